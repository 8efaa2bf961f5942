"""Reading the one number that an answer states. Nothing is ever evaluated; the text is only matched."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Longer texts are not short answers that hold a number; the cap also bounds the time of the matching.
MAX_NUMBER_CHARACTERS = 400

_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2014": "-", "\uff0d": "-"})
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2007\u2009\u202f", " "))
_FRACTION_SIGNS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_SUPERSCRIPTS = {sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?([+-]?[0-9.]{1,30})\s?\}\s?\{\s?([+-]?[0-9.]{1,30})\s?\}")
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{3})")
_LATEX_NOISE = re.compile(r"\\[,;!:]|\\(?:text|mathrm|boxed|left|right)\b")
_POWER_OF_TEN = re.compile(r"\s?(?:\\times|×|x|\*)\s?10\s?(?:\^|\*\*)\s?\{?\s?([+-]?[0-9]{1,4})\s?\}?")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    # Not inside a word or an exponent: the 2 of "H2O", "m^2" or "m^{2}" is not the answer.
    r"(?<![\w^])(?<!\^\{)"
    # After a digit or a bracket a minus is a range or a difference ("10-15"), not a sign.
    r"(?P<sign>(?<![0-9)\]%])(?<![0-9)\]%] )[+-] ?)?[$€£]? ?"
    r"(?:(?P<whole>[0-9]{1,9}) (?=[0-9]{1,6} ?/ ?[0-9]))?"
    rf"(?P<value>{_DIGITS})(?P<exponent>[eE][+-]?[0-9]{{1,4}})?"
    r"(?: ?/ ?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
    r"(?P<power> ?(?:\^|\*\*) ?\{? ?[+-]?[0-9])?(?P<percent> ?(?:%|percent\b))?"
)


@dataclass(frozen=True)
class ParsedNumber:
    """A finite number and whether it was written as a percentage ("50 %" is value 50.0, is_percent True)."""

    value: float
    is_percent: bool = False


def parse_number(text: str) -> ParsedNumber | None:
    """The number that ``text`` states, or None if it states none, or several different ones.

    Understood: signs, decimals ("5.", ".5"), thousands separators ("1,234" or "1 234"), fractions ("3/4", "1 1/2",
    "\\frac{3}{4}"), scientific notation ("3e5", "3 x 10^5"), percent, currency signs, units and words around
    the number. After an equals sign only what follows the last one counts ("2 + 3 = 5").
    """
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    found = set(map(_to_number, _NUMBER.finditer(_plain_spelling(text))))
    return found.pop() if len(found) == 1 else None


def _plain_spelling(text: str) -> str:
    """``text`` with one spelling for minus signs, spaces, fractions and powers of ten."""
    plain = text.translate(_MINUS_SIGNS).translate(_SPACES)
    for sign, spelling in _FRACTION_SIGNS.items():
        plain = plain.replace(sign, f" {spelling} ")
    for sign, spelling in _SUPERSCRIPTS.items():
        plain = plain.replace(sign, spelling)
    plain = _LATEX_NOISE.sub("", _LATEX_THOUSANDS.sub(",", plain))
    plain = _LATEX_FRACTION.sub(r" \1/\2 ", plain)
    plain = _POWER_OF_TEN.sub(r"e\1 ", plain).replace("\\", "")
    return " ".join(plain.rpartition("=")[2].split())


def _to_number(match: re.Match[str]) -> ParsedNumber | None:
    """The value of one match; None if it is none that we can hold (10^6, 1/0, 1e999)."""
    if match["power"]:
        return None
    value = float(match["value"].replace(",", "").replace(" ", "") + (match["exponent"] or ""))
    if match["divisor"]:
        divisor = float(match["divisor"])
        if divisor == 0.0:
            return None
        value /= divisor
    if match["whole"]:
        value += float(match["whole"])
    if (match["sign"] or "").startswith("-"):
        value = -value
    return ParsedNumber(value, is_percent=bool(match["percent"])) if math.isfinite(value) else None

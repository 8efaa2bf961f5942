"""How Qwen2.5-Math's evaluation respells answers before it compares them (``strip_string`` in its
``evaluation/parser.py``).

Its steps are kept, and their order, since each sees what those before it left: with units gone a word may be a number,
with "and" gone a word may be another. What the published steps do not do though they seem to is left out.
"""

from __future__ import annotations

import re
from functools import lru_cache

from vlm_pg.answers.numbers import ONES, TENS

# Removed where they stand between signs that belong to no word, one after another, twice; then the same with an "s".
# fmt: off
_UNITS = (
    "east", "degree", "mph", "kmph", "ft", "m sqaure", " m east", "sq m", "deg", "mile", "q .", "monkey", "prime",
    "ratio", "profit of rs", "rd", "o", "gm", "p . m", "lb", "tile", "per", "dm", "lt", "gain", "ab", "way", "west",
    "a .", "b .", "c .", "d .", "e .", "f .", "g .", "h .", "t", "a", "h", "no change", "men", "soldier", "pie", "bc",
    "excess", "st", "inches", "noon", "percent", "by", "gal", "kmh", "c", "acre", "rise", "a . m", "th", "π r 2", "sq",
    "mark", "l", "toy", "coin", "sq . m", "gallon", "° f", "profit", "minw", "yr", "women", "feet", "am", "pm", "hr",
    "cu cm", "square", "v â € ™", "are", "rupee", "rounds", "cubic", "cc", "mtr", "s", "ohm", "number", "kmph", "day",
    "hour", "minute", "min", "second", "man", "woman", "sec", "cube", "mt", "sq inch", "mp", "∏ cm ³", "hectare",
    "more", "sec", "unit", "cu . m", "cm 2", "rs .", "rs", "kg", "g", "month", "km", "m", "cm", "mm", "apple", "liter",
    "loss", "yard", "pure", "year", "increase", "decrease", "d", "less", "Surface", "litre", "pi sq m", "s .", "metre",
    "meter", "inch",
)
# fmt: on
_FIRST = (
    *(("\\!", ""), ("\\end{array}", "\\end{pmatrix}"), ("bmatrix", "pmatrix"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\neq", "\\ne"), ("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\left", ""), ("\\right", "")),
    *(("\\{", "{"), ("\\}", "}")),
)
_MARKS = ("^{\\circ}", "^\\circ", "\\$", "$", "\\(", "\\)")
_NAMES = ("x=", "y=", "z=", "x\\in", "y\\in", "z\\in", "x\\to", "y\\to", "z\\to")
_ARRAY = re.compile(r"\\begin\{array\}\{.*?\}")
_LAST_TEXT = re.compile(r"\\text{.*?}$")
_TEXT = re.compile(r"\\text\{(.*?)\}")
_BOX = re.compile(r"\\mbox{.*?}")
_ZEROS = (re.compile(r"(\d+)\.0*([^\d])"), re.compile(r"(\d+)\.0*$"))
_ROOT = re.compile(r"\\sqrt(\w+)")
_LARGE = {"billion": 10**9, "million": 10**6, "thousand": 1000}
_WORDS = (
    {word: value for value, word in enumerate(ONES)}
    | {word: 10 * value for value, word in enumerate(TENS, 2)}
    | {"hundred": 100}
    | _LARGE
)


def respelled(text: str) -> str:
    """The text as it is compared: "\\\\dfrac12 cm" -> "\\\\frac{1}{2}", "x=5.0" -> "5", "five apples" -> "5".

    Takes time in the square of the text's length: callers limit it.
    """
    text = text.strip().replace("\n", "").rstrip(".")
    text = _ARRAY.sub(r"\\begin{pmatrix}", text)
    for old, new in _FIRST:
        text = text.replace(old, new)
    text = _LAST_TEXT.sub("", text).strip() or text
    text = _without_units(text)
    for mark in _MARKS:
        text = text.replace(mark, "")
    text = _TEXT.sub(r"\1", _number_of_words(text))
    for name in _NAMES:
        text = text.replace(name, "")
    text = text.replace("\\emptyset", "{}").replace("(-\\infty,\\infty)", "\\mathbb{R}")
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = text.replace("infinity", "\\infty")
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = _BOX.sub("", text.replace("+\\inity", "\\infty").replace("and", "").replace("\\mathbf", ""))
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = _ZEROS[1].sub(r"\1", _ZEROS[0].sub(r"\1\2", text))
    if text.startswith("."):
        text = f"0{text}"
    left, sign, right = text.partition("=")
    if sign and "=" not in right and len(left) <= 2:
        text = right
    return _slash_as_fraction(_braced_fractions(_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")))


@lru_cache(maxsize=1)
def _unit_patterns() -> tuple[re.Pattern[str], ...]:
    names = [*_UNITS, *(f"{unit}s" for unit in _UNITS)]
    return tuple(re.compile(rf"(^|\W){name}($|\W)") for name in names)


def _without_units(text: str) -> str:
    for pattern in _unit_patterns() * 2:
        text = pattern.sub(r"\1\2", text) or text
    return text


def _number_of_words(text: str) -> str:
    """The number that the number words in a text make, whatever else stands there; the text if it has none.

    As the package word2number has it. _number_of_words("five apples") == "5"
    """
    spaced = text.replace("-", " ").lower()
    if spaced.isdecimal():
        return str(int(spaced)) if len(spaced) <= 1000 else text
    words = [word for word in spaced.split() if word in _WORDS or word == "point"]
    if not words or words.count("point") > 1:
        return text
    if "point" in words:
        place = words.index("point")
        words, decimals = words[:place], words[place + 1 :]
    else:
        decimals = []
    whole = _whole_number(words)
    return text if whole is None else str(whole + _decimals(decimals) if decimals else whole)


def _whole_number(words: list[str]) -> int | None:
    """0 of no words; None of more than one of a scale, of a smaller one first, and of too many words."""
    scales = [word for word in words if word in _LARGE]
    if scales != [word for word in _LARGE if word in scales]:
        return None
    if len(words) == 1:
        return _WORDS[words[0]]
    total = 0
    for scale in scales:
        place = words.index(scale)
        value = _below_thousand(words[:place])
        if value is None:
            return None
        total, words = total + value * _LARGE[scale], words[place + 1 :]
    rest = _below_thousand(words) if words else 0
    return None if rest is None else total + rest


def _decimals(words: list[str]) -> float:
    """What the words behind "point" make, each of one digit; 0 if one is not."""
    digits = [ONES.index(word) if word in ONES[:10] else -1 for word in words]
    return 0 if -1 in digits else float("0." + "".join(map(str, digits)))


def _below_thousand(words: list[str]) -> int | None:
    values = [_WORDS[word] for word in words]
    if len(values) in (3, 4):
        return values[0] * values[1] + sum(values[2:])
    if len(values) == 2:
        return values[0] * values[1] if 100 in values else sum(values)
    return values[0] if values else None


def _braced_fractions(text: str) -> str:
    """ "\\\\frac12" and "\\\\frac1{72}" with braces around both parts; the text as it was if one lacks a part."""
    first, *rest = text.split("\\frac")
    parts = [first]
    for part in rest:
        if part.startswith("{"):
            parts.append(part)
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            parts.append(f"{{{part[0]}}}{part[1:]}")
        else:
            parts.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return "\\frac".join(parts)


def _slash_as_fraction(text: str) -> str:
    """ "3/4" as "\\\\frac{3}{4}", of whole numbers and roots alone."""
    parts = text.split("/")
    if len(parts) != 2 or not all("sqrt" in part or _is_whole(part) for part in parts):
        return text
    return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?(?:0|[1-9][0-9]{0,999})", text) is not None and text != "-0"

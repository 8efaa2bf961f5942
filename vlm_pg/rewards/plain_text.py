"""One spelling for what people and models write in many: the first step of every reader of answers.

Everything here takes time linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata

# Scripts that are written without gaps between words: Thai, Lao, Myanmar, Khmer, kana, Han.
NO_GAPS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# A letter of a word that a number or an option's letter could be part of. The scripts above, and Hangul with its
# particles, touch numbers and Latin letters without being one word with them.
WORD_LETTER = rf"[^\W\d_{NO_GAPS}\uac00-\ud7a3]"

# A choice, a yes or no, a box or a span of time takes no more than this to say; longer texts are not read for them.
MAX_SHORT_CHARACTERS = 10_000
# The same of texts that are compared as a whole; what ROUGE needs grows with both texts.
MAX_ROUGE_CHARACTERS, MAX_LONG_CHARACTERS = 20_000, 100_000

_MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\u2796\ufe63\uff0d"
_DASHES = "\u2014\u2015\u2e3a\u2e3b"
_WORD = re.compile(rf"[{NO_GAPS}]|[^\s{NO_GAPS}]+")
_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5"}
_FRACTIONS |= {"⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
# Before NFKC, which makes "m2" of "m²" and "11⁄2" of "1½".
_SIGNS = str.maketrans(
    {sign: f" {fraction} " for sign, fraction in _FRACTIONS.items()}
    | {sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {"\u2044": "/", "\u2215": "/"}
)
_WRAPPERS = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf)\s{0,2}\{([^{}]{0,400})\}"
)
_MOST_NESTED_WRAPPERS = 3
_MARKS = re.compile(
    # Pairs of Markdown, the ends of _emphasis_ that touch no word outside, and headings.
    r"\*\*|__|`|(?<![^\W_])_(?=[^\s_])|(?<=[^\s_])_(?![^\W_]|[{(\\])|(?<![\w*])\*(?=[^\s*])|(?<=[^\s*])\*(?![\w*({])|(?m:^#{1,6}\s)"
)
_STRUCK_OUT = re.compile(r"~~[^~]{1,400}~~")
_QUOTES = "\"'“”‘’«»「」『』"
DECORATION = f"*_`{_QUOTES}$ \t\r\n"


class _Table(dict[int, str]):
    """What one character becomes; filled as characters come."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        category = unicodedata.category(sign)
        if sign in _MINUS_SIGNS:
            plain = "-"
        elif sign in _DASHES:
            plain = " - "
        elif category == "Nd":
            plain = str(unicodedata.decimal(sign))
        elif category == "Zs":
            plain = " "
        elif category == "Cf":  # marks of direction, joiners, soft hyphens: not to be seen
            plain = ""
        else:
            plain = sign
        if len(self) < 4096:
            self[code] = plain
        return plain


_TABLE = _Table()


def plain(text: str) -> str:
    """``text`` in Unicode's compatibility forms (NFKC), with ASCII digits, minus signs and spaces, nothing invisible.

    plain("１２．５\\u00a0µm") -> "12.5 μm"
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", text).translate(_TABLE)


def plain_short(text: str, limit: int = MAX_SHORT_CHARACTERS) -> str:
    """``plain``, or "" for a text of more than ``limit`` characters, before or after."""
    found = plain(text) if len(text) <= limit else ""
    return found if len(found) <= limit else ""


def plain_formula(text: str) -> str:
    """As ``plain``; fractions and powers that are one sign are spelled out: "5 m²" -> "5 m^2", "1½" -> "1 1/2 "."""
    return text if text.isascii() else plain(text.translate(_SIGNS))


def without_marks(text: str, decoration: str = DECORATION) -> str:
    """``text`` without Markdown, what it strikes out, ``decoration`` around it, and LaTeX's boxes and fonts.

    without_marks("**\\\\boxed{B}**") -> "B"
    """
    for _ in range(_MOST_NESTED_WRAPPERS):
        text = _WRAPPERS.sub(r"\1", text)
    return _MARKS.sub("", _STRUCK_OUT.sub(" ", text)).strip(decoration)


def words(text: str) -> list[str]:
    """What white space separates; each character of a script without gaps is a word: "出口 Exit" -> 出, 口, Exit."""
    return _WORD.findall(text)

"""One spelling for text that is written in many: the first step of every reader of answers; and where case counts.

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
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
# LaTeX's fonts; the alternatives of a macro's name.
FONTS = "text(?:bf|it|rm|sf|tt|up|normal)?|mbox|math(?:rm|bf|sf|it)|operatorname"
_FONT = re.compile(rf"\\(?:{FONTS})\s{{0,8}}\{{")
_BRACES = re.compile(rf"(?P<escaped>\\[\\{{}}])|(?P<wrapper>{_BOX.pattern}|{_FONT.pattern})|[{{}}]")
# Delimiters of formulas, sizes of brackets and formulas, thin and wide spaces.
_LAYOUT = re.compile(
    r"(?<!\\)\\(?:[()\[\],;:! ]|(?:left|right|displaystyle|textstyle)(?![A-Za-z])\s?)|(?<!~)~(?=[A-Za-z\\])"
)
_MARKS = re.compile(
    # Pairs of Markdown, the ends of _emphasis_ that touch no word outside, and headings.
    r"\*\*|__|`|(?<![^\W_])_(?=[^\s_])|(?<=[^\s_])_(?![^\W_]|[{(\\])|(?<![\w*])\*(?=[^\s*])|(?<=[^\s*])\*(?![\w*({])|(?m:^#{1,6}\s)"
)
_STRUCK_OUT = re.compile(r"~~[^~]{1,400}~~")
_QUOTES = "\"'“”‘’«»「」『』"
DECORATION = f"*_`{_QUOTES}$ \t\r\n"
_CURRENCY = re.compile(r"(?<!\\)\$\s?[-+]?\.?[0-9]")  # where no second dollar sign makes it a formula


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
    """``text`` without Markdown, what it strikes out, ``decoration`` around it, and LaTeX's layout.

    without_marks("**\\\\boxed{B}**") -> "B"; without_marks('"$5"') -> "$5"
    """
    text = _MARKS.sub("", _STRUCK_OUT.sub(" ", without_layout(text)))
    is_price = text.count("$") == 1 and _CURRENCY.search(text)
    return text.strip(decoration.replace("$", "") if is_price else decoration)


def without_layout(text: str) -> str:
    """``text`` without LaTeX's boxes, fonts, sizes, spaces and delimiters, but for dollar signs; their contents stay.

    without_layout("\\\\boxed{\\\\frac{3}{\\\\text{4}}}") -> "\\\\frac{3}{4}"
    """
    if "\\" not in text:
        return text
    pieces, end = [], 0
    is_wrapper: list[bool] = []  # of each open brace
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            is_dropped = bool(is_wrapper) and is_wrapper.pop()
        elif is_dropped := brace["wrapper"] is not None:
            is_wrapper.append(True)
        elif brace[0] == "{":
            is_wrapper.append(False)
        if is_dropped:
            pieces.append(text[end : brace.start()])
            end = brace.end()
    return _LAYOUT.sub(" ", "".join(pieces) + text[end:])


def boxed(text: str) -> list[str]:
    """The contents of all outermost boxes of LaTeX; one that never closes reaches to the end.

    boxed("\\\\boxed{\\\\frac{3}{4}} cm") -> ["\\\\frac{3}{4}"]
    """
    return split_at_boxes(text)[0]


def split_at_boxes(text: str) -> tuple[list[str], list[str]]:
    """The contents of all outermost boxes, and the texts before, between and after these.

    split_at_boxes("x = \\\\boxed{5} cm") -> (["5"], ["x = ", " cm"])
    """
    contents, outside, end = [], [], 0
    while box := _BOX.search(text, end):
        outside.append(text[end : box.start()])
        end = _closing_brace(text, box.end())
        contents.append(text[box.end() : end].strip())
        end += 1
    return contents, [*outside, text[end:]]


def whole_font(text: str) -> str | None:
    """What the one font of LaTeX around all of ``text`` is of: "\\\\textbf{5}" -> "5"; None if there is none."""
    font = _FONT.match(text)
    if font is None or (end := _closing_brace(text, font.end())) < len(text) - 1:
        return None
    return text[font.end() : end].strip()


def _closing_brace(text: str, start: int) -> int:
    """Where the brace is closed behind which ``start`` is; the end of the text if it never is."""
    depth = 1
    for brace in _BRACES.finditer(text, start):
        depth += -1 if brace[0] == "}" else 0 if brace["escaped"] else 1
        if depth == 0:
            return brace.start()
    return len(text)


def words(text: str) -> list[str]:
    """What white space separates; each character of a script without gaps is a word: "出口 Exit" -> 出, 口, Exit."""
    return _WORD.findall(text)


# A macro of LaTeX, or letters that touch each other.
_RUN = re.compile(r"\\[A-Za-z]+|[^\W\d_]+")
_LONGEST_SYMBOL = 2  # letters: "Co", "mV", "x"
# With an operator, in delimiters, or a number with a unit of one letter.
_FORMULA = re.compile(r"[\\=+^<>*/{}]|\$.*\$|^[-+]?[0-9][0-9.,]*\s?[A-Za-z]$", re.DOTALL)
_FORMULA_ONLY = re.compile(r"[\u0370-\u03ff]|\\[A-Za-z]+")
_SAME_WORDS = {"no", "ok"}  # in any case


def is_formula(text: str) -> bool:
    return _FORMULA.search(text) is not None


def same_but_for_case(left: str, right: str, *, formulas: bool = False) -> bool:
    """Whether two texts differ at most in capitals that say nothing; ``formulas``: both are, whatever they look like.

    Those of words never count. Those of macros and of single Greek letters always do ("\\\\Delta", "\\\\delta"), and so
    do those of one or two Latin letters, which may be a symbol: "CO76" is not "Co76", and "X^2" not "x^2". Outside of
    formulas such letters may all be small ("co2" for "CO2"), or the text be set in capitals.
    """
    if left == right:
        return True
    if left.casefold() != right.casefold():
        return False
    formulas = formulas or is_formula(left) or is_formula(right)
    runs_in_capitals = (run for text in (left, right) if text.isupper() for run in _RUN.findall(text))
    if not formulas and any(len(run) > _LONGEST_SYMBOL for run in runs_in_capitals):
        return True
    runs = zip(_RUN.findall(left), _RUN.findall(right), strict=False)
    return all(_same_run(one, other, in_formula=formulas) for one, other in runs)


def _same_run(left: str, right: str, *, in_formula: bool) -> bool:
    if left == right:
        return True
    if _FORMULA_ONLY.fullmatch(left):
        return False
    if len(left) > _LONGEST_SYMBOL or not left.isascii() or left.casefold() in _SAME_WORDS:
        return True
    return not in_formula and (left.islower() or right.islower())

"""One spelling for prose with mathematics in it: LaTeX as plain signs, numbers with a decimal point and no separators.

All searches take time linear in the length of the text, which is capped before.
"""

from __future__ import annotations

import re

from vlm_pg.answers.plain_text import plain_formula, without_marks

# The last statement counts; what stands before the last so many characters is not looked at.
MAX_CHARACTERS = 20_000

_PROGRAM = re.compile(
    r"```\s{0,3}(?:python|py|javascript|js|java|c|cpp|bash|sh|sql|r|matlab)\b(?:[^`]|`(?!``)){0,20000}(?:```|$)",
    re.IGNORECASE,
)
_FENCE = re.compile(r"```\w{0,12}")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|up)?|mbox|math(?:rm|bf|sf|it)|operatorname|fbox|boxed|"
    r"emph)\s{0,2}\{([^{}]{0,400})\}"
)
_NUMBER_IN_BRACES = r"\{?\s{0,2}([+-]?[0-9]{0,15}\.?[0-9]{1,15})\s{0,2}\}?"
_FRACTION = re.compile(
    rf"\\[dtc]?frac\s{{0,2}}\{{\s{{0,2}}([+-]?[0-9.]{{1,20}})\s{{0,2}}\}}\s{{0,2}}{_NUMBER_IN_BRACES}"
)
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s{0,2}([0-9])\s{0,2}([0-9])(?![0-9])")
_ANY_FRACTION = re.compile(r"\\[dtc]?frac\s{0,2}\{([^{}]{0,200})\}\s{0,2}\{([^{}]{0,200})\}")
_ROOT = re.compile(r"\\sqrt\s{0,2}(?:\[[^\]]{0,10}\])?\s{0,2}\{([^{}]{0,200})\}")
_THOUSANDS = re.compile(r"(?<=[0-9])\s{0,2}(?:\{,\}|\\,|\\!|,\\!)\s{0,2}(?=[0-9]{3}(?![0-9]))")
_DEGREES = re.compile(r"\s{0,2}\^\s{0,2}\{?\s{0,2}\\circ\s{0,2}\}?|\\degree")
_SIGNS = {
    r"\times": "×",
    r"\cdot": "·",
    r"\div": "÷",
    r"\approx": "≈",
    r"\simeq": "≈",
    r"\sim": "≈",
    r"\equiv": "≡",
    r"\leq": "≤",
    r"\le": "≤",
    r"\geq": "≥",
    r"\ge": "≥",
    r"\neq": "≠",
    r"\ne": "≠",
    r"\lt": "<",
    r"\gt": ">",
    r"\pm": "±",
    r"\mu": "μ",
    r"\Omega": "Ω",
    r"\pi": "π",
    r"\therefore": " therefore ",
    r"\Rightarrow": " therefore ",
    r"\implies": " therefore ",
    r"\rightarrow": " → ",
    r"\to": " → ",
    r"\infty": "∞",
}
_MACRO = re.compile(r"\\([A-Za-z]{1,20})")
_MATH = re.compile(r"(?<!\\)\$\$([^$]{1,2000})\$\$|(?<!\\)\$(?=[^\s$])([^$\n]{1,1000})(?<!\s)\$(?!\d)")
_SPACES = re.compile(r"\\[,;:! ]|(?<=[A-Za-z}.])~(?=[A-Za-z\\])|\u200b")
_THEREFORE = str.maketrans({"⇒": " therefore ", "∴": " therefore ", "⟹": " therefore ", "≃": "≈", "≅": "≈", "≒": "≈"})
_STRONG_TAG = re.compile(r"</?(?:b|i|em|strong|br|p|div|span|sub|sup|u)\s{0,2}/?>", re.IGNORECASE)
# A dot that ends no sentence.
_ABBREVIATION = re.compile(
    r"\b(i\.e|e\.g|approx|ca|sq|cu|vs|etc|d\.\s?h|z\.\s?B|bzw|Nr|No|Fig|env|aprox|lbs|ft|hr|hrs|"
    r"min|sec|Dr|Mr|Mrs|St|т\.\s?е)\.(?=\s{0,3}[^\s\n])",
    re.IGNORECASE,
)
_KEPT_SHORT = {"i.e": "i.e.,", "d.h": "d.h.,", "d. h": "d.h.,", "т.е": "т.е.,", "т. е": "т.е.,"}

_LOOSE = r"(?<![0-9.,])"
_SPACED = re.compile(rf"{_LOOSE}([0-9]{{1,3}}(?:[ '’][0-9]{{3}}){{1,5}})(?![0-9])")
_EUROPEAN = re.compile(rf"{_LOOSE}([0-9]{{1,3}}(?:\.[0-9]{{3}}){{1,5}}),([0-9]{{1,9}})(?![0-9])")
_POINT_THOUSANDS = re.compile(rf"{_LOOSE}([1-9][0-9]{{0,2}}(?:\.[0-9]{{3}}){{1,5}})(?![0-9]|[.,][0-9])")
_COMMA_THOUSANDS = re.compile(rf"{_LOOSE}([1-9][0-9]{{0,2}}(?:,[0-9]{{2,3}}){{0,4}},[0-9]{{3}})(?![0-9]|,[0-9])")
_DECIMAL_COMMA = re.compile(r"(?<![0-9.,(\[])([0-9]{1,9}),([0-9]{1,9})(?![0-9]|[.,][0-9]|\s?[)\]])")
_DECIMAL_COMMA_LANGUAGES = frozenset({"de", "fr", "es", "pt", "it", "nl", "ru"})
_POINT_LANGUAGES = _DECIMAL_COMMA_LANGUAGES - {"ru", "fr"}


def plain_prose(text: str) -> str:
    """The end of ``text`` without Markdown, LaTeX and program code, in ASCII digits; lines stay lines.

    plain_prose(r"**So** $\\frac{3}{8} \\approx 0{,}375\\text{ m}$") -> "So 3/8 ≈ 0,375 m"
    """
    text = text[-MAX_CHARACTERS:].replace("\r", "\n")
    text = _FENCE.sub("\n", _PROGRAM.sub("\n", text))
    text = plain_formula(text.translate(_THEREFORE)).replace("**Note", "\nNote")
    text = _MATH.sub(lambda match: match[1] or match[2], text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    text = _THOUSANDS.sub("", text).replace("{:}", ":").replace("{,}", ",")
    text = _SHORT_FRACTION.sub(r" \1/\2 ", _FRACTION.sub(r" \1/\2 ", text))
    text = _ANY_FRACTION.sub(r" (\1)/(\2) ", _ROOT.sub(r"sqrt(\1)", text))
    text = _DEGREES.sub("°", text)
    text = re.sub(r"\\\\(?:\[[^\]\n]{0,10}\])?", "\n", text)
    text = _SPACES.sub(" ", text.replace("\\%", "%").replace("\\$", "USD ").replace("\\#", "#"))
    text = re.sub(r"\\[()]", " ", re.sub(r"\\[\[\]]", "\n", text))
    text = _MACRO.sub(lambda match: _SIGNS.get(match[0], " "), text)
    text = re.sub(r"\^\s?\{\s?([^{}]{1,12}?)\s?\}", r"^\1", text)
    text = re.sub(r"_\s?\{\s?([^{}]{1,12}?)\s?\}", r"_\1", text)
    text = without_marks(_STRONG_TAG.sub(" ", text), " \t\r\n")
    return re.sub(r"[ \t]{2,}", " ", text.replace("{", " ").replace("}", " ").replace("\\", " "))


def without_abbreviations(text: str) -> str:
    """``text`` without the dots of abbreviations, which end no sentence: "258 sq. ft" -> "258 sq ft"."""
    return _ABBREVIATION.sub(lambda match: _KEPT_SHORT.get(match[1].lower(), match[1]), text)


def plain_numbers(text: str, language: str) -> str:
    """``text`` with a decimal point and without thousands separators in its numbers.

    plain_numbers("1.400,50 Dollar", "de") -> "1400.50 Dollar"; plain_numbers("1,400", "") -> "1400"

    Args:
        text: in one spelling.
        language: of the whole output (``language_of``); "1.400" is a thousand and more only in some.
    """
    text = _SPACED.sub(lambda match: re.sub(r"[^0-9]", "", match[1]), text)
    text = _EUROPEAN.sub(lambda match: match[1].replace(".", "") + "." + match[2], text)
    if language in _POINT_LANGUAGES:
        text = _POINT_THOUSANDS.sub(lambda match: match[1].replace(".", ""), text)
    if language not in _DECIMAL_COMMA_LANGUAGES:
        text = _COMMA_THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    return _DECIMAL_COMMA.sub(r"\1.\2", text)

"""The mathematics within a sentence: where a formula begins and ends, and which side of it is its result.

All searches take time linear in the length of the text, which is capped before.
"""

from __future__ import annotations

import re

from vlm_pg.eval.reading.fraction_words import fractions_for_words

MAX_CHARACTERS = 2000

_MACRO = r"\\(?!(?:text|mbox|quad|qquad|item)[a-z]{0,6}(?![A-Za-z]))(?:[A-Za-z]{1,20}|[{}%|,!;: ])"
_MATRIX = r"\\begin\{[pbvBV]?(?:small)?matrix\}(?:(?!\\end).){0,800}\\end\{[pbvBV]?(?:small)?matrix\}"
_FUNCTION = r"(?:sqrt|sin|cos|tan|cot|log|ln|pi|inf|infinity)(?![A-Za-z])"
_TEXT_UNIT = r"\\(?:text|mbox|mathrm)\s?\{[^{}]{0,40}\}"
_VARIABLE = (
    r"(?<![A-Za-z'’])(?:[A-Zb-zΑ-ω]|a(?=\s?[-+=^_*/<>≤≥),])|(?<=[0-9)])[a-z]{1,3}|[a-z]{2}(?=\s?[=^]))(?![A-Za-z'’])"
)
_TOKEN = (
    rf"(?:{_MATRIX}|{_TEXT_UNIT}|{_MACRO}|{_FUNCTION}|{_VARIABLE}|[0-9]|"
    rf"(?<=[0-9])[a-z](?![a-z])|(?<=[0-9)])\.(?=[0-9]|\\(?:overline|bar))|(?<![\w.)\]}}])\.(?=[0-9])|"
    r"[-+−–*/^_=<>≤≥≠≈±√·×÷⋅|!%°π∞∪∩∈()\[\]{}²³⁴⁵⁶⁷⁸⁹⁰¹½⅓¼¾&$]|[,;:](?=\s?[-−+0-9a-z(\[{√π\\]))"
)
_RUN = re.compile(rf"{_TOKEN}(?:\s{{0,3}}{_TOKEN}){{0,400}}", re.DOTALL)
_SUBSTANCE = re.compile(r"[0-9]|\\begin|\\(?:emptyset|varnothing|infty|pi|sqrt)|[π∅]|[A-Za-z]\s?[-+=<>≤≥^]")
_SIDES = re.compile(r"(?<![<>!≤≥\\])=(?!=)|\\equiv(?![A-Za-z])|≡")
_APPROXIMATE = re.compile(r"≈|\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])")
_RELATION = re.compile(r"[<>≤≥]|\\(?:le|ge|leq|geq|lt|gt|leqslant|geqslant)(?![A-Za-z])")
_MEMBER = re.compile(r"^\s{0,3}\$?\s{0,3}[a-z]\s{0,3}(?:\\in(?![A-Za-z])|∈)\s{0,3}")
_OUTWARD = re.compile(
    r"^\s{0,3}([\[\]])\s{0,3}([^\[\]();]{1,60}?)\s{0,3}[;,]\s{0,3}([^\[\]();]{1,60}?)\s{0,3}([\[\]])\s{0,3}$"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))")
_ROOT_IN_WORDS = re.compile(
    r"(?:\btimes\s{1,3})?\b(?:the\s{1,3})?square\s{1,3}root\s{1,3}of\s{1,3}([0-9]{1,12})", re.IGNORECASE
)
_BASE_IN_WORDS = re.compile(r"\b([0-9A-F]{1,30})\s{1,3}(?:\(?in\s{1,3})?\(?base\s{1,3}\$?([0-9]{1,2})\$?\)?")


def with_words_as_signs(text: str) -> str:
    """``text`` without LaTeX's thousands separators, and with roots, bases and fractions told in words as signs.

    with_words_as_signs("3 times the square root of 2") -> "3 \\sqrt{2}"
    """
    text = fractions_for_words(_THOUSANDS.sub("", text))
    return _BASE_IN_WORDS.sub(r"\1_{\2}", _ROOT_IN_WORDS.sub(r"\\sqrt{\1}", text))


def runs(text: str) -> list[str]:
    """The formulas of ``text`` that say something, in order, without the words between them."""
    found = (match[0].strip(" ,;:$&") for match in _RUN.finditer(text[:MAX_CHARACTERS]))
    return [
        run
        for one in found
        if _SUBSTANCE.search(run := _balanced(one)) and run[0] not in "^_" and not re.fullmatch(r"[-+=.,]+", run)
    ]


def result_of(run: str, *, is_equation: bool) -> str:
    """What a formula comes to: its last exact side; all of it where an equation is asked for, or for an inequality.

    result_of("d = \\sqrt{18} = 3\\sqrt{2} \\approx 4.24", is_equation=False) -> "3\\sqrt{2}"
    """
    sides = _APPROXIMATE.split(run)
    exact = sides[0]
    if len(sides) > 1 and not _has_value(_SIDES.split(exact)[-1]):
        exact = sides[-1]
    if is_equation or (_RELATION.search(exact) and not _SIDES.search(exact)):
        return as_interval(exact.strip(" $"))
    parts = _SIDES.split(exact)
    if len(parts) == 2 and _is_sum(parts[1]) and re.fullmatch(r"[\s$]*-?[0-9][0-9.,]*[\s$]*", parts[0]):
        return parts[0].strip(" $,")  # "18 = 60 - 42"
    return as_interval(_MEMBER.sub("", parts[-1]).strip(" $,"))


def as_interval(text: str) -> str:
    """An interval with outward brackets as others write it: "[1;4[" -> "[1, 4)"; any other text as it is."""
    text = _MEMBER.sub("", text)
    match = _OUTWARD.match(text)
    if match is None or (match[1] == "[" and match[4] == "]"):
        return text
    return f"{'[' if match[1] == '[' else '('}{match[2]}, {match[3]}{']' if match[4] == ']' else ')'}"


def has_square_factor_under_root(latex: str) -> bool:
    """Whether a root of a whole number in ``latex`` is not in simplest form: that of 18 is three times that of 2."""
    numbers = re.findall(r"(?:\\sqrt\s?\{?\s?|√\s?\(?|sqrt\s?\(\s?)([0-9]{1,6})(?![0-9])", latex)
    return any(int(n) % (k * k) == 0 for n in numbers for k in range(2, int(int(n) ** 0.5) + 1))


def _has_value(side: str) -> bool:
    return re.search(r"[0-9√π]|\\sqrt|\\pi", side) is not None


def _is_sum(side: str) -> bool:
    return re.search(r"[0-9]\s?[-+−*/×·÷]\s?[0-9]", side) is not None


def _balanced(run: str) -> str:
    """``run`` without a bracket at its ends that has no partner there; half-open intervals keep theirs."""
    if re.search(r"\([\s$]*$", run):
        run = run.rstrip("( $")  # "$12$ (cm)"
    opening, closing = len(re.findall(r"[(\[]", run)), len(re.findall(r"[)\]]", run))
    if opening > closing and run[:1] in "([":
        return run[1:].strip(" ,")
    if closing > opening and run[-1:] in ")]":
        return run[:-1].strip(" ,")
    return run

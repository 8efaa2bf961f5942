"""Where capitals matter: cobalt is not carbon monoxide, and a large delta no small one."""

from __future__ import annotations

import re

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
    if not formulas and any(map(_is_shouted, (left, right))):
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


def _is_shouted(text: str) -> bool:
    return text.isupper() and any(len(run) > _LONGEST_SYMBOL for run in _RUN.findall(text))

"""Mathematical answers: equal to the gold answer by math-verify, in LaTeX or plain spelling.

``compare`` runs in the checking processes only (``pool.py``): sympy may take for ever or all memory on a text that a
model wrote. What is known to do so is refused before it is parsed or evaluated; a deadline and a memory limit stop the
rest. Nothing is evaluated as Python: only math-verify's LaTeX grammar is used, and sympy's parser, which evaluates, is
replaced while a comparison runs. (Users' isolated functions run in the same processes, with sympy as it is.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import LatexExtractionConfig, parse, parser
from sympy.parsing import sympy_parser

from vlm_pg.answers.expressions import TooCostly, check_cost, equal, joined_inequalities, value_of_equation
from vlm_pg.answers.latex import (
    MAX_PARTS,
    MAX_TEXT_CHARACTERS,
    TEXT_MACRO,
    Part,
    Parts,
    has_letters,
    is_explanation,
    read_parts,
    statement,
    tuple_elements,
    unspaced,
    words,
)
from vlm_pg.answers.verdict import shorten

# Of the mathematics in an answer. The gold answers of MATH-500 have at most 53 characters.
MAX_CHARACTERS = 400
_MACRO = re.compile(r"\\([A-Za-z]+)")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|arc[a-z]*|log|ln|exp|sinh|cosh|tanh|det)\b")
_BINOMIAL = re.compile(r"\\[dt]?binom(?!\s?\{\s?(?:[0-9]{1,3}|[a-z])\s?\}\s?\{\s?(?:[0-9]{1,3}|[a-z])\s?\})")

# "1 1" is neither 11 nor 1; mixed numbers and thousands are spelled out before.
_SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")

# What an answer is written with. Integrals, sums, products and limits are tasks, not answers, and may take for ever.
_MACRO_NAMES = """
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom pi infty cdot times div pm mp le leq leqslant ge geq geqslant ne
    neq lt gt approx equiv in notin cup cap setminus emptyset varnothing subset subseteq mathbb mathbf mathrm
    mathcal mathit text textbf textit textrm mbox mathsf operatorname
    textnormal textsf texttt textup boxed fbox left right big Big bigg Bigg bigl bigr
    Bigl Bigr middle begin end sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp det circ
    degree prime overline underline bar vec hat angle triangle ldots cdots dots to rightarrow mid vert lvert rvert
    lfloor rfloor lceil rceil langle rangle lbrace rbrace lbrack rbrack quad qquad displaystyle textstyle limits
    land lor wedge vee and or not cent pounds euro alpha beta gamma delta epsilon varepsilon zeta eta theta iota
    kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi
    Psi Omega i imath j Re Im hline
"""
_KNOWN_MACROS = frozenset(_MACRO_NAMES.split())
_OPERATORS = (":", "+", "-", "*", "/", "^", "_", "!", "\\cdot", "\\times", "\\div", "\\pm", "\\mp", "\\frac", "\\sqrt")
_ENVIRONMENTS = re.compile(r"\\(?:begin|end)\s?\{(?!(?:[pbvBV]?matrix|array|cases)\})")
_EQUAL_PAIRS = (
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin^2(x)", r"1-\cos^2(x)"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("1.5", r"\frac{3}{2}"),
    ("x<3", "3>x"),
    ("2x+y=1", "4x+2y=2"),
    ("[1,2)", "[1, 2.0)"),
    (r"\{1,2\}", r"\{2, 1.0\}"),
    ("(1, 2)", "(1, 2.0)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4.0\end{pmatrix}"),
)
_VARIABLE = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_NUMBER_CODE = re.compile(r"\s*(Integer|Float)\s*\(\s*'?([0-9]{0,600}\.?[0-9]{0,600})'?\s*\)\s*")


class _Refused(Exception):
    """A text that is not compared, and why."""


class _Exhausted(BaseException):
    """Memory or stack ran out while parsing. No Exception, because math-verify takes any for "cannot be parsed"."""


def prepare() -> None:
    """Import what ``compare`` needs in this process.

    Raises:
        RuntimeError: answers that are equal are not found equal: the installed versions do not fit together.
    """
    # Much of sympy is imported on first use, some of which evaluates texts of its own: here with sympy's own parser.
    unequal = [pair for pair in _EQUAL_PAIRS if _compare(*pair)[0] != 1.0]
    if unequal:
        raise RuntimeError(f"math-verify does not find these answers equal: {unequal}. Install the stated versions.")
    _parse.cache_clear()


@contextmanager
def without_evaluation() -> Iterator[None]:
    """sympy's parser evaluates no text, but reads plain numbers, in this process and meanwhile."""
    original = sympy_parser.eval_expr
    sympy_parser.eval_expr = _number_without_evaluation
    try:
        yield
    finally:
        sympy_parser.eval_expr = original


def compare(gold: str, answer: str) -> tuple[float | None, str]:
    """Accuracy and note: 1.0 if ``answer`` is the gold answer in any spelling, else 0.0; None for an unusable gold.

    Equal are: 1/2, 0.5 and \\frac12; 1 1/2 and 3/2; x=5 and 5; 50% and 0.5, or 50; 5 and 5 cm, 150 cm and 1.5 m; sets
    and lists of solutions in any order; tuples, matrices and equations entry by entry; an inequality and its interval.
    Not equal are variables of other case, and amounts in other currencies.
    Words are compared as words.

    Raises:
        MemoryError, RecursionError: while parsing or comparing. That says nothing about the answer.
    """
    with without_evaluation():
        return _compare(gold, answer)


def _compare(gold: str, answer: str) -> tuple[float | None, str]:
    if is_explanation(gold):
        note = "it is several sentences; give the answer alone, or in \\boxed{}"
        return None, f"gold answer {shorten(gold)} cannot be used: {note}"
    gold_latex = statement(gold)
    gold_words = words(gold_latex, gold=True)
    latex = statement(answer)
    if gold_words is not None:
        return float(words(latex, gold=False) == gold_words), ""
    gold_parts = read_parts(gold_latex, letters_are_units=False)
    try:
        _parse_all(gold_latex, gold_parts)
    except _Refused as reason:
        return None, f"gold answer {shorten(gold)} cannot be used: {reason}"
    if len(answer) > MAX_TEXT_CHARACTERS:
        return 0.0, f"answer has more than {MAX_TEXT_CHARACTERS} characters, which no mathematical answer has"
    if unspaced(latex) == unspaced(gold_latex):
        return 1.0, ""
    parts = read_parts(latex, letters_are_units=not any(map(has_letters, gold_parts.parts)))
    try:
        _parse_all(latex, parts)
        return float(_same_parts(gold_parts, parts)), ""
    except _Refused as reason:
        return 0.0, f"answer cannot be read: {reason}"


def _parse_all(latex: str, parts: Parts) -> None:
    """Raises:
    _Refused: for one of the parts or all of them.
    """
    if not latex:
        raise _Refused("there is no mathematics in it")
    if len(parts.parts) > MAX_PARTS:
        raise _Refused(f"it lists more than {MAX_PARTS} solutions")
    for part in parts.parts:
        _parse(part.latex)


def _same_parts(gold: Parts, found: Parts) -> bool:
    """Whether two statements list the same solutions."""
    sets = [_set_of(side) for side in (gold, found)]
    if sets != [None, None]:
        # "x < 2 or x > 3" is one set; beside it the other statement must be one, too.
        if any(one is None and len(side.parts) > 1 for one, side in zip(sets, (gold, found), strict=True)):
            return False
        gold_set, found_set = (
            _parse(side.parts[0].latex) if one is None else one for one, side in zip(sets, (gold, found), strict=True)
        )
        return equal(gold_set, found_set)
    if len(gold.parts) == len(found.parts) == 1:
        return _same_part(gold.parts[0], found.parts[0])
    if len(gold.parts) == 1 or len(found.parts) == 1:
        return _same_as_tuple(gold, found)
    if len(gold.parts) != len(found.parts):
        return False
    variables = [{part.variable for part in side.parts} for side in (gold, found)]
    if all("" not in side and len(side) > 1 for side in variables):
        values = {part.name: part for part in found.parts}
        return len(values) == len(found.parts) and all(
            part.name in values and _same_value(part, values[part.name]) for part in gold.parts
        )
    if any(len(side) > 1 for side in variables):  # "x = 1, y = 2" and "1, 2": in this order
        return all(map(_same_value, gold.parts, found.parts))
    left = list(found.parts)
    for part in gold.parts:
        match = next((other for other in left if _same_value(part, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_as_tuple(gold: Parts, found: Parts) -> bool:
    """Whether a list is what a tuple holds: "1, 2" and "(1, 2)", or "x = 1, y = 2"."""
    single, several = (gold, found) if len(gold.parts) == 1 else (found, gold)
    elements = tuple_elements(single.parts[0].latex)
    names = [part.name for part in several.parts]
    if elements is None or len(elements) != len(names) or (any(names) and sorted(set(names)) != names):
        return False
    return all(
        equal(_parse(part.value or part.latex), _parse(element))
        for part, element in zip(several.parts, elements, strict=True)
    )


def _same_value(gold: Part, found: Part) -> bool:
    """Whether two of several solutions are equal; one that is a set is no number there: "{1}, {2}" is not {1, 2}."""
    gold, found = (replace(part, latex=part.value or part.latex) for part in (gold, found))
    if gold.latex.lstrip().startswith("\\{") != found.latex.lstrip().startswith("\\{"):
        return False
    return _same_part(gold, found)


def _same_part(gold: Part, found: Part) -> bool:
    """Whether two solutions are equal, their units, percent signs and bases of numbers considered."""
    if found.base:
        return gold.latex == found.latex and gold.base == found.base
    if _has_other_case(gold.value or gold.latex, found.value or found.latex):
        return False
    expression, gold_expression = _parse(found.latex), _parse(gold.latex)
    if any(_is_reversed(part, read) for part, read in ((gold, gold_expression), (found, expression))):
        return False
    if gold.unit is not None and found.unit is not None:
        factor = found.unit.factor_to(gold.unit)
        if factor is None:
            return False
        if factor != 1:
            value = value_of_equation(expression)
            if not isinstance(value, sympy.Expr):
                return False
            expression = value * sympy.Rational(factor.numerator, factor.denominator)
    if equal(gold_expression, expression):
        return True
    if gold.is_percent == found.is_percent:
        return False
    share, whole = (gold_expression, expression) if gold.is_percent else (expression, gold_expression)
    share, whole = value_of_equation(share), value_of_equation(whole)
    return isinstance(share, sympy.Expr) and isinstance(whole, sympy.Expr) and equal(share / 100, whole)


def _is_reversed(part: Part, expression: Any) -> bool:
    """Whether an interval's ends are in the wrong order: to sympy, "[5, 3)" and "(7, 2]" are one empty set."""
    return getattr(expression, "is_empty", False) is True and "empty" not in part.latex


def _has_other_case(gold: str, found: str) -> bool:
    """Whether a variable stands for another one of the gold statement, as m for M and \\delta for \\Delta do.

    math-verify reads all as small ones. So does this for a statement's only variable: 3r^2 is 3R^2.
    """
    known, named = (set(_VARIABLE.findall(latex)) for latex in (gold, found))
    others = [one for one in named - known if one.lower() in map(str.lower, known)]
    return any(len(known) > 1 or one.startswith("\\") for one in others)


def _set_of(parts: Parts) -> Any:
    """The numbers that inequalities joined by "or" or "and" leave; None for other statements."""
    if len(parts.parts) < 2 or not parts.join:
        return None
    return joined_inequalities([_parse(part.latex) for part in parts.parts], parts.join)


@lru_cache(maxsize=256)
def _parse(latex: str) -> Any:
    """The expression a statement stands for.

    Raises:
        _Refused: it is not parsed, cannot be, or would take too long to evaluate.
    """
    reason = refusal(latex)
    if reason is not None:
        raise _Refused(reason)
    # Only the LaTeX grammar: the other extraction hands plain expressions to an evaluating parser.
    # Units are read by us: the library's list takes the s of 2s and the t of 2t for one.
    normalization = replace(LatexExtractionConfig().normalization_config, units=False)
    configuration = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
    try:
        with _exhaustion_shown(), _terms_checked():
            found = parse(
                f"${latex}$", [configuration], fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
            )
        if found:
            check_cost(found[0])
    except TooCostly as error:
        raise _Refused(str(error)) from None
    except (MemoryError, RecursionError):
        raise
    except Exception:
        found = []
    if not found:
        raise _Refused("it is no mathematics that can be parsed")
    return found[0]


@contextmanager
def _terms_checked() -> Iterator[None]:
    """Meanwhile the parser has the cost of every term checked before it makes anything of it.

    An interval's ends are compared when it is made, and how sympy does that depends on the process's hash seed.

    Raises:
        TooCostly: what the text says so far.
    """
    original = _Latex2Sympy.convert_add

    def convert_and_check(parser: Any, term: Any) -> Any:
        expression = original(parser, term)
        check_cost(expression)
        return expression

    _Latex2Sympy.convert_add = convert_and_check
    try:
        yield
    finally:
        _Latex2Sympy.convert_add = original


@contextmanager
def _exhaustion_shown() -> Iterator[None]:
    """math-verify's parser does not swallow MemoryError and RecursionError meanwhile.

    Raises:
        MemoryError, RecursionError: while parsing.
    """
    original = parser.latex2sympy

    def parse_or_show(*arguments: Any, **options: Any) -> Any:
        try:
            return original(*arguments, **options)
        except (MemoryError, RecursionError) as error:
            raise _Exhausted(error) from None

    parser.latex2sympy = parse_or_show
    try:
        yield
    except _Exhausted as exhausted:
        raise exhausted.args[0] from None
    finally:
        parser.latex2sympy = original


def _number_without_evaluation(code: str, _locals: object, _globals: object) -> Any:
    """sympy reads number literals by evaluating "Integer (5 )" and "Float ('0.5' )" as Python; here they are matched.

    Raises:
        ValueError: any other code.
    """
    match = _NUMBER_CODE.fullmatch(code)
    if match is None:
        raise ValueError("text is never evaluated as Python here")
    return sympy.Integer(match[2]) if match[1] == "Integer" else sympy.Float(match[2])


def refusal(latex: str) -> str | None:
    """Why a parser does not get to see this statement; None if it does."""
    if not latex:
        return "there is no mathematics in it"
    if len(latex) > MAX_CHARACTERS:
        return f"it has more than {MAX_CHARACTERS} characters"
    if not (latex.isascii() and latex.isprintable()):
        return "it has characters that mathematics is not written with"
    unknown = next((name for name in _MACRO.findall(latex) if name not in _KNOWN_MACROS), None)
    if unknown is not None:
        return f"\\{unknown[:40]} is not something a final answer is written with"
    if _ENVIRONMENTS.search(latex):
        return "it has an environment other than a matrix"
    if _SIDE_BY_SIDE.search(latex):
        return "it has two numbers side by side"
    if _BINOMIAL.search(latex):
        return "it has a binomial of something other than small numbers or letters"
    counts = {
        # The parser's time doubles with every few levels of brackets; gold answers of MATH-500 have at most 2.
        "nested brackets": (_depth(latex), 5),
        "digits in a row": (max(map(len, re.findall("[0-9]+", latex)), default=0), 60),
        "letters": (sum(map(str.isalpha, _MACRO.sub("", TEXT_MACRO.sub("", latex)))), 40),
        "macros": (latex.count("\\"), 40),
        "functions": (len(_FUNCTION.findall(latex)), 6),
        "relations": (len(re.findall(r"[=<>]|\\[lg]eq?\b|\\[lg]t\b|\\neq?\b", latex)), 8),
        "vertical bars": (latex.count("|") + latex.count("vert"), 8),
        "unions": (latex.count("\\cup") + latex.count("\\cap"), 4),
        "powers and indices": (latex.count("^") + latex.count("_"), 8),
        "operators": (sum(map(latex.count, _OPERATORS)), 30),
        "parts": (latex.count(",") + latex.count(";") + latex.count("&") + latex.count("\\\\"), 80),
    }
    return next((f"it has more than {most} {what}" for what, (count, most) in counts.items() if count > most), None)


def _depth(latex: str) -> int:
    depth = deepest = 0
    for sign in latex:
        if sign in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in ")]}":
            depth = max(0, depth - 1)
    return deepest

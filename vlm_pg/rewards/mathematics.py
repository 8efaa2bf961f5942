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
from functools import lru_cache
from typing import Any

from vlm_pg.rewards.latex_text import MAX_TEXT_CHARACTERS, refusal, statement, words
from vlm_pg.rewards.pool import Call, Outcome
from vlm_pg.rewards.verdict import Verdict, shorten

PREPARE = Call(f"{__name__}:prepare")
# Two values apart by more than this share are different, whatever rounding math-verify would allow for.
_CLEARLY_DIFFERENT = 1e-3
# Two values this near are the same number, computed in another order.
_ROUNDING = 1e-12
# Nearer to 0 than this, evaluation cannot tell a number from 0: sqrt(8) - 2 sqrt(2) comes out as 1e-123.
_NEXT_TO_ZERO = 1e-60
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
_NUMBER_CODE = re.compile(r"\s*(Integer|Float)\s*\(\s*'?([0-9]{0,600}\.?[0-9]{0,600})'?\s*\)\s*")


class _Refused(Exception):
    """A text that is not compared, and why."""


class _Exhausted(BaseException):
    """Memory or stack ran out while parsing. No Exception, because math-verify takes any for "cannot be parsed"."""


def mathematics_call(gold: str, answer: str) -> Call:
    """The task for the checking processes."""
    return Call(f"{__name__}:compare", (gold, answer))


def mathematics_verdict(outcome: Outcome) -> Verdict:
    """What a finished task says: no value if it was stopped or failed."""
    return Verdict(None, f"not checked: {outcome.problem}") if outcome.problem else Verdict(*outcome.value)


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
    from sympy.parsing import sympy_parser

    original = sympy_parser.eval_expr
    sympy_parser.eval_expr = _number_without_evaluation
    try:
        yield
    finally:
        sympy_parser.eval_expr = original


def compare(gold: str, answer: str) -> tuple[float | None, str]:
    """Accuracy and note: 1.0 if ``answer`` is the gold answer in any spelling, else 0.0; None for an unusable gold.

    Equal are: 1/2, 0.5 and \\frac12; x=5 and 5; 50% and 0.5; 5 and 5 cm; sets in any order, tuples, intervals, matrices
    and equations entry by entry. Words are compared as words.

    Raises:
        MemoryError, RecursionError: while parsing or comparing. That says nothing about the answer.
    """
    with without_evaluation():
        return _compare(gold, answer)


def _compare(gold: str, answer: str) -> tuple[float | None, str]:
    gold_latex = statement(gold)
    gold_words = words(gold_latex, gold=True)
    latex = statement(answer)
    if gold_words is not None:
        return float(words(latex, gold=False) == gold_words), ""
    try:
        gold_expression = _parse(gold_latex)
    except _Refused as reason:
        return None, f"gold answer {shorten(gold)} cannot be used: {reason}"
    if len(answer) > MAX_TEXT_CHARACTERS:
        return 0.0, f"answer has more than {MAX_TEXT_CHARACTERS} characters, which no mathematical answer has"
    if latex.replace(" ", "") == gold_latex.replace(" ", ""):
        return 1.0, ""
    try:
        expression = _parse(latex)
    except _Refused as reason:
        return 0.0, f"answer cannot be read: {reason}"
    return float(_equal(gold_expression, expression)), ""


def _equal(gold: Any, found: Any) -> bool:
    import sympy
    from math_verify import verify

    distance = _distance(gold, found)
    if distance is not None and distance > _CLEARLY_DIFFERENT:
        return False  # spares nearly all wrong answers the symbolic simplification, which is what takes long
    if distance is not None and distance < _ROUNDING and not (gold.free_symbols or found.free_symbols):
        # Between exact ones a small distance is one: 2^100 - 1 is near to 2^100, and another number.
        same = gold.has(sympy.Float) or found.has(sympy.Float) or _vanishes(gold, found)
    else:
        same = False
    if same:
        return True
    try:
        # None: our deadline holds instead of its alarm.
        return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False  # they cannot be compared, as a set with a matrix


def _vanishes(gold: Any, found: Any) -> bool:
    """Whether the difference of two terms without variables is 0 as far as it can be computed."""
    import sympy

    if isinstance(found, sympy.Eq) and not isinstance(gold, sympy.Eq):
        found = found.rhs
    try:
        return abs(complex((gold - found).evalf(15))) < _NEXT_TO_ZERO * max(1.0, abs(complex(gold.evalf(15))))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False  # math-verify decides


def _distance(gold: Any, found: Any) -> float | None:
    """Relative distance of two terms' values where all their variables have some chosen values.

    None: there are no such values, or one is 0 or next to it. "x = 5" is the term 5 where the gold answer is no
    equation.
    """
    import sympy

    if isinstance(found, sympy.Eq) and not isinstance(gold, sympy.Eq):
        found = found.rhs
    if not (isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr)):
        return None
    if gold.has(sympy.UnevaluatedExpr) or found.has(sympy.UnevaluatedExpr):
        return None  # a percentage: equal to its number with and without the sign
    symbols = sorted(gold.free_symbols | found.free_symbols, key=str)
    chosen = {symbol: sympy.Rational(7 + 4 * place, 11) for place, symbol in enumerate(symbols)}
    try:
        left, right = (complex(side.evalf(15, subs=chosen)) for side in (gold, found))
        if min(abs(left), abs(right)) < _NEXT_TO_ZERO:
            return None
        return abs(left - right) / max(abs(left), abs(right))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None  # no number comes out: math-verify decides


@lru_cache(maxsize=256)
def _parse(latex: str) -> Any:
    """The expression a statement stands for.

    Raises:
        _Refused: it is not parsed, cannot be, or would take too long to evaluate.
    """
    from math_verify import LatexExtractionConfig, parse

    from vlm_pg.rewards.expression_cost import TooCostly, check_cost

    reason = refusal(latex)
    if reason is not None:
        raise _Refused(reason)
    # Only the LaTeX grammar: the other extraction hands plain expressions to an evaluating parser.
    configuration = LatexExtractionConfig(boxed_match_priority=-1)
    try:
        with _exhaustion_shown():
            found = parse(
                f"${latex}$", [configuration], fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
            )
    except (MemoryError, RecursionError):
        raise
    except Exception:
        found = []
    if not found:
        raise _Refused("it is no mathematics that can be parsed")
    try:
        check_cost(found[0])
    except TooCostly as error:
        raise _Refused(str(error)) from None
    return found[0]


@contextmanager
def _exhaustion_shown() -> Iterator[None]:
    """math-verify's parser does not swallow MemoryError and RecursionError meanwhile.

    Raises:
        MemoryError, RecursionError: while parsing.
    """
    from math_verify import parser

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
    import sympy

    match = _NUMBER_CODE.fullmatch(code)
    if match is None:
        raise ValueError("text is never evaluated as Python here")
    return sympy.Integer(match[2]) if match[1] == "Integer" else sympy.Float(match[2])

"""Whether two expressions are equal: by their values where that decides, else by math-verify.

Runs in the checking processes only (``pool.py``): sympy may take for ever or all memory.
"""

from __future__ import annotations

from typing import Any

from vlm_pg.rewards.relations import is_equation, set_that_holds, value_of_equation

# Two values apart by more than this share are different, whatever rounding math-verify would allow for: numbers, and
# terms with variables.
_DIFFERENT_NUMBERS, _CLEARLY_DIFFERENT = 2e-6, 1e-3
# Two values this near are the same number, computed in another order.
_ROUNDING = 1e-12
# Nearer to 0 than this, evaluation cannot tell a number from 0: sqrt(8) - 2 sqrt(2) comes out as 1e-123.
_NEXT_TO_ZERO = 1e-60


def equal(gold: Any, found: Any) -> bool:
    """Whether ``found`` says what ``gold`` does; an equation gives the value that it ends in, an inequality its set."""
    import sympy
    from math_verify import verify

    gold, found = set_that_holds(gold), set_that_holds(found)
    gold, found = _with_one_imaginary_unit(gold, found)
    if not is_equation(gold):
        found = value_of_equation(found)
        if found is None:
            return False
    distance = _distance(gold, found)
    if distance is not None:
        is_number = not (gold.free_symbols or found.free_symbols)
        if distance > (_DIFFERENT_NUMBERS if is_number else _CLEARLY_DIFFERENT):
            return False  # spares nearly all wrong answers the symbolic simplification, which is what takes long
        # Between exact ones a small distance is one: 2^100 - 1 is near to 2^100, and another number.
        if (
            is_number
            and distance < _ROUNDING
            and (gold.has(sympy.Float) or found.has(sympy.Float) or _vanishes(gold, found))
        ):
            return True
    try:
        # None: our deadline holds instead of its alarm.
        return bool(verify(gold, found, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False  # they cannot be compared, as a set with a matrix


def _with_one_imaginary_unit(gold: Any, found: Any) -> tuple[Any, Any]:
    """The parser takes i for a variable: beside the root of a negative number it is the imaginary unit."""
    import sympy

    def is_imaginary(term: Any) -> bool:
        is_root = isinstance(term, sympy.Pow) and term.exp == sympy.S.Half
        return is_root and term.base.is_number and term.base.is_negative is True

    sides = (gold, found)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return sides
    if not any(is_imaginary(term) for side in sides for term in sympy.preorder_traversal(side)):
        return sides
    unit = {symbol: sympy.I for side in sides for symbol in side.free_symbols if symbol.name == "i"}
    return gold.xreplace(unit), found.xreplace(unit)


def _vanishes(gold: Any, found: Any) -> bool:
    """Whether the difference of two terms without variables is 0 as far as it can be computed."""
    try:
        return abs(complex((gold - found).evalf(15))) < _NEXT_TO_ZERO * max(1.0, abs(complex(gold.evalf(15))))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False  # math-verify decides


def _distance(gold: Any, found: Any) -> float | None:
    """Relative distance of two terms' values where all their variables have some chosen values.

    None: there are no such values, or one is 0 or next to it.
    """
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr)):
        return None
    symbols = sorted(gold.free_symbols | found.free_symbols, key=str)
    chosen = {symbol: sympy.Rational(7 + 4 * place, 11) for place, symbol in enumerate(symbols)}
    try:
        left, right = (complex(side.evalf(15, subs=chosen)) for side in (gold, found))
        if min(abs(left), abs(right)) < _NEXT_TO_ZERO:
            return None
        return abs(left - right) / max(abs(left), abs(right))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None  # no number comes out: math-verify decides

"""sympy expressions: their cost without evaluation, the values of equations, and equality.

Runs in the checking processes only (``pool.py``): sympy may take for ever or all memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
from sympy import MatrixBase

_ROUNDING = 1e-9


def is_equation(expression: Any) -> bool:
    """Whether it is an equation or a chain of them."""
    from math_verify.grader import is_equation as found

    return bool(found(expression))


def value_of_equation(expression: Any) -> Any:
    """The value an answer gives: 5 of "x = 5", "2 + 3 = 5" and "5 = x"; itself if it is no equation.

    None for what gives none: "4 = 5" and "x = 4 = 5" are false, "x + 1 = 5" says it of another term.
    """
    if not is_equation(expression):
        return expression
    sides = _sides(expression)
    values = [side for side in sides if not _is_name(side)]
    if not values:
        return sides[-1]  # "A = BC" for "BC"
    numbers = [side for side in values if isinstance(side, sympy.Expr) and not side.free_symbols]
    if len(values) > 1 and (len(numbers) < len(values) or not _are_equal(numbers)):
        return None
    return values[-1]


def set_that_holds(expression: Any) -> Any:
    """The set of "x \\in S"; itself for anything else."""
    if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.Set) and _is_name(expression.lhs):
        return expression.rhs
    return expression


def joined_inequalities(expressions: Sequence[Any], join: str) -> Any:
    """The numbers for which one ("or") or all ("and") of the inequalities of one variable hold; else None."""
    from math_verify.grader import is_relation

    if not all(is_relation(one) and not is_equation(one) for one in expressions):
        return None
    if len(set().union(*(one.free_symbols for one in expressions))) != 1:
        return None
    try:
        sets = [one.as_set() for one in expressions]
    except (NotImplementedError, TypeError, ValueError):
        return None
    return sympy.Union(*sets) if join == "or" else sympy.Intersection(*sets)


def _sides(expression: Any) -> list[Any]:
    relations = [expression] if isinstance(expression, sympy.Eq) else list(expression._unsorted_args)
    return [relations[0].lhs, *(relation.rhs for relation in relations)]


def _is_name(side: Any) -> bool:
    """What is only a name: x, AB, x/y, f(2), |AB|."""
    from math_verify.grader import is_expr_of_only_symbols
    from sympy.core.function import AppliedUndef

    if isinstance(side, AppliedUndef):
        return True
    if isinstance(side, sympy.Abs):
        return _is_name(side.args[0])
    return bool(is_expr_of_only_symbols(side))


def _are_equal(numbers: Sequence[Any]) -> bool:
    try:
        values = [complex(number.evalf(15)) for number in numbers]
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False
    return all(abs(value - values[-1]) <= _ROUNDING * max(1.0, abs(values[-1])) for value in values)


# Two values apart by more than this share are different, whatever rounding math-verify would allow for: numbers, and
# terms with variables.
_DIFFERENT_NUMBERS, _CLEARLY_DIFFERENT = 2e-6, 1e-3
# Two values this near are the same number, computed in another order.
_SAME_NUMBER = 1e-12
# Nearer to 0 than this, evaluation cannot tell a number from 0: sqrt(8) - 2 sqrt(2) comes out as 1e-123.
_NEXT_TO_ZERO = 1e-60


def equal(gold: Any, found: Any) -> bool:
    """Whether ``found`` says what ``gold`` does; an equation gives the value that it ends in, an inequality its set."""
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
            and distance < _SAME_NUMBER
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
    if not (isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr)):
        return None
    symbols = sorted(gold.free_symbols | found.free_symbols, key=str)
    chosen = {symbol: sympy.Rational(7 + 4 * index, 11) for index, symbol in enumerate(symbols)}
    try:
        left, right = (complex(side.evalf(15, subs=chosen)) for side in (gold, found))
        if min(abs(left), abs(right)) < _NEXT_TO_ZERO:
            return None
        return abs(left - right) / max(abs(left), abs(right))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None  # no number comes out: math-verify decides


MAX_NODES = 400
# Digits of the largest number that may come up when an expression is evaluated.
MAX_DIGITS = 3000.0
# A sum to a power is multiplied out: (x + y)^12 is still quick.
MAX_POWER_OF_SUM = 12
MAX_FACTORIAL = 1000.0
_EXPONENTIAL = (sympy.exp, sympy.sinh, sympy.cosh)
_TASKS = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


class TooCostly(BaseException):
    """An expression that is not evaluated, and why. No Exception: the parser goes on after any."""


def check_cost(expression: object) -> None:
    """Raises:
    TooCostly: the expression has too many parts, a number in it too many digits, or it is a task such as an integral.
    """
    # Every list of answers, matrix, set or equation is checked part by part.
    parts = list(expression.flat()) if isinstance(expression, MatrixBase) else [expression]
    nodes = 0
    for part in parts:
        if not isinstance(part, sympy.Basic):
            continue
        for node in sympy.preorder_traversal(part):
            nodes += 1
            if nodes > MAX_NODES:
                raise TooCostly(f"it has more than {MAX_NODES} parts")
            if isinstance(node, _TASKS):
                raise TooCostly(f"it has a {type(node).__name__} that is not worked out")
            # The parser gives a matrix to a power as either.
            is_power = isinstance(node, sympy.MatPow | sympy.Pow) and getattr(node.base, "is_Matrix", False)
            if is_power and not (node.exp.is_Integer and abs(node.exp) <= MAX_POWER_OF_SUM):
                raise TooCostly(f"it has a matrix to a power other than a whole number up to {MAX_POWER_OF_SUM}")
            if isinstance(node, sympy.Expr) and not isinstance(node, MatrixBase | sympy.MatPow):
                digits(node)


def digits(node: sympy.Expr) -> float:
    """Upper bound of log10 |value|, at least 0; symbols count as one digit.

    Raises:
        TooCostly: above ``MAX_DIGITS``, or a factorial of more than ``MAX_FACTORIAL``.
    """
    bound = _bound(node)
    if not bound <= MAX_DIGITS:  # also for nan
        raise TooCostly(f"a number in it may have more than {MAX_DIGITS:g} digits")
    return bound


def _bound(node: sympy.Expr) -> float:
    if isinstance(node, sympy.Rational):
        return math.log10(max(abs(int(node.p)), int(node.q), 1))
    if isinstance(node, sympy.Float):
        return abs(math.log10(abs(node))) if node and -1e300 < node < 1e300 else 1.0 if not node else 1000.0
    if not node.args or not all(isinstance(part, sympy.Expr) for part in node.args):
        return 1.0
    if isinstance(node, sympy.Pow):
        size = _value(digits(node.exp))
        if node.exp.is_Rational and size > MAX_POWER_OF_SUM and node.base.has(sympy.Add):
            raise TooCostly(f"it has a sum to a power above {MAX_POWER_OF_SUM}")
        # A base of one digit still doubles with every power; a small one grows as fast downwards.
        return max(digits(node.base), 0.5) * size
    parts = [digits(part) for part in node.args]
    if isinstance(node, sympy.Add):
        return max(parts) + math.log10(len(parts))
    if isinstance(node, sympy.Mul):
        return sum(parts)
    if isinstance(node, sympy.factorial | sympy.factorial2 | sympy.subfactorial | sympy.gamma):
        size = _value(parts[0])
        if size > MAX_FACTORIAL:
            raise TooCostly(f"it has a factorial of a number that may be above {MAX_FACTORIAL:g}")
        return size * parts[0] + 1.0
    if isinstance(node, _EXPONENTIAL):
        return _value(parts[0])
    if max(parts) > 20.0:
        raise TooCostly("it has a function of a number that may have more than 20 digits")
    return 1.0 + max(parts)


def _value(digits_bound: float) -> float:
    return 10.0 ** min(digits_bound, 300.0)

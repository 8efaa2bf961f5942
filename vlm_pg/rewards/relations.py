"""Equations and inequalities as answers: what they say of a value, or of a set of numbers.

sympy is imported where it is used: this runs in the checking processes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ROUNDING = 1e-9


def is_equation(expression: Any) -> bool:
    """Whether it is an equation or a chain of them."""
    from math_verify.grader import is_equation as found

    return bool(found(expression))


def value_of_equation(expression: Any) -> Any:
    """The value an answer gives: 5 of "x = 5", "2 + 3 = 5" and "5 = x"; itself if it is no equation.

    None for what gives none: "4 = 5" and "x = 4 = 5" are false, "x + 1 = 5" says it of another term.
    """
    import sympy

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
    import sympy

    if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.Set) and _is_name(expression.lhs):
        return expression.rhs
    return expression


def joined_inequalities(expressions: Sequence[Any], join: str) -> Any:
    """The numbers for which one ("or") or all ("and") of the inequalities of one variable hold; else None."""
    import sympy
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
    import sympy

    relations = [expression] if isinstance(expression, sympy.Eq) else list(expression._unsorted_args)
    return [relations[0].lhs, *(relation.rhs for relation in relations)]


def _is_name(side: Any) -> bool:
    """What is only a name: x, AB, x/y, f(2), |AB|."""
    import sympy
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

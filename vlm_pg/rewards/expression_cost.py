"""How large the numbers in a sympy expression can get, found without evaluating it."""

from __future__ import annotations

import math

import sympy
from sympy import MatrixBase

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
            if isinstance(node, MatrixBase | sympy.MatPow):
                check_power(node)
            elif isinstance(node, sympy.Expr):
                digits(node)


def check_power(node: object) -> None:
    """Raises:
    TooCostly: a matrix to a power above ``MAX_POWER_OF_SUM``.
    """
    if isinstance(node, sympy.MatPow) and not (node.exp.is_Integer and abs(node.exp) <= MAX_POWER_OF_SUM):
        raise TooCostly(f"it has a matrix to a power other than a whole number up to {MAX_POWER_OF_SUM}")


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
        return _bound_of_power(node.base, node.exp)
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


def _bound_of_power(base: sympy.Expr, exponent: sympy.Expr) -> float:
    size = _value(digits(exponent))
    if exponent.is_Rational and size > MAX_POWER_OF_SUM and base.has(sympy.Add):
        raise TooCostly(f"it has a sum to a power above {MAX_POWER_OF_SUM}")
    # A base of one digit still doubles with every power; a small one grows as fast downwards.
    return max(digits(base), 0.5) * size


def _value(digits_bound: float) -> float:
    return 10.0 ** min(digits_bound, 300.0)

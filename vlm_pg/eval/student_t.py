"""Student's t distribution with a whole number of degrees of freedom."""

from __future__ import annotations

import math
from functools import lru_cache

_HALVINGS = 100  # of the angle's range: far beyond what a float can hold


@lru_cache(maxsize=1024)
def t_quantile(degrees: int, coverage: float = 0.95) -> float:
    """How many standard errors an interval reaches to either side to hold the share ``coverage``: 2.776 for 4 degrees.

    The distribution has a closed form in the angle atan(t / sqrt(degrees)) (Abramowitz & Stegun, Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4), which is inverted by halving.

    Raises:
        ValueError: no degree of freedom, or a coverage outside (0, 1).
    """
    if degrees < 1 or not 0.0 < coverage < 1.0:
        raise ValueError(
            f"There is no interval for {degrees} degrees of freedom and coverage {coverage}. At least 1 degree and a "
            "coverage between 0 and 1 are needed; give questions of two videos or more."
        )
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _coverage(middle, degrees) < coverage:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _coverage(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine * cosine
    return 2 / math.pi * (angle + sine * total) if odd else sine * total

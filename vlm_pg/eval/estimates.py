"""Means over questions, what is made of several of them, and how far they may be off by the choice of questions.

Questions of one video or image are not independent draws: they are one cluster. With G clusters, n questions and
cluster sums of deviations D_g = sum over its questions of (x_i - mean), the standard error of a mean is

    sqrt(G / (G - 1) * sum over g of D_g^2) / n

(the cluster-robust sandwich for a mean with its finite-sample factor G / (G - 1): Cameron & Miller, "A Practitioner's
Guide to Cluster-Robust Inference", Journal of Human Resources 2015; without the factor, "CR0", it is the
clustered error of Miller, "Adding Error Bars to Evals", arXiv 2411.00640).

A figure made of several means, f(m_1, ..., m_H), moves by df/dm_h for each (the delta method). Cluster g moves it by
U_g = sum over h of df/dm_h * sqrt(G_h / (G_h - 1)) * D_hg / n_h, and its standard error is sqrt(sum over g of U_g^2).
With clusters that lie in one group each it is the stratified error sum of w_h^2 * se_h^2; a video whose questions fall
into two groups brings their covariance with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Unit = Literal["fraction", "percent"]
# (cluster, value) of one question
Valued = tuple[str, float]
# Least and largest possible value.
Limits = tuple[float, float]
UNLIMITED: Limits = (-math.inf, math.inf)
SCORES: Limits = (0.0, 1.0)
# Below, a standard error is rounding: no spread was seen, which says nothing about its size.
_MIN_ERROR = 1e-12
_HALVINGS = 100  # of the angle's range in ``t_quantile``: far beyond what a float can hold


@dataclass(frozen=True)
class Figure:
    """One number of a table: None where nothing could be scored.

    ``n``: questions behind it. ``clusters``: videos or images behind it. ``standard_error``: see the module; None
    where it cannot be estimated, since all questions of a group are about one video. ``limits``: of the value.

    Figure(0.625, n=8, clusters=4, standard_error=0.1)
    """

    value: float | None
    n: int
    clusters: int = 0
    standard_error: float | None = None
    unit: Unit = "fraction"
    limits: Limits = UNLIMITED

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %: t standard errors to either side, t of clusters - 1 degrees of freedom, within the limits.

        None without a standard error, or with one of 0: a few equal scores would claim certainty.
        """
        if self.value is None or self.standard_error is None or self.standard_error < _MIN_ERROR:
            return None
        reach = t_quantile(self.clusters - 1) * self.standard_error
        return max(self.limits[0], self.value - reach), min(self.limits[1], self.value + reach)

    def to_row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "value": self.value,
            "standard_error": self.standard_error,
            "interval_95": None if self.interval is None else list(self.interval),
            "n": self.n,
            "clusters": self.clusters,
            "unit": self.unit,
        }


@dataclass(frozen=True)
class Estimate:
    """A value, and by how much each cluster moves it (U_g of the module)."""

    value: float
    n: int
    moves: Mapping[str, float]
    has_error: bool
    limits: Limits = UNLIMITED

    @property
    def standard_error(self) -> float | None:
        """None where a group has one cluster only."""
        return math.sqrt(math.fsum(move**2 for move in self.moves.values())) if self.has_error else None

    def figure(self, unit: Unit = "fraction", scale: float = 1.0) -> Figure:
        """``scale`` (positive) times the value."""
        error = self.standard_error
        return Figure(
            self.value * scale,
            self.n,
            len(self.moves),
            None if error is None else scale * error,
            unit,
            (self.limits[0] * scale, self.limits[1] * scale),
        )


def mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def mean_of(values: Sequence[Valued], limits: Limits = UNLIMITED) -> Estimate | None:
    """The mean over questions; None without any.

    Args:
        limits: of every value.
    """
    if not values:
        return None
    average = math.fsum(value for _, value in values) / len(values)
    deviations: dict[str, list[float]] = defaultdict(list)
    for cluster, value in values:
        deviations[cluster].append(value - average)
    count = len(deviations)
    factor = math.sqrt(count / (count - 1)) if count > 1 else 1.0
    moves = {cluster: factor * math.fsum(each) / len(values) for cluster, each in deviations.items()}
    return Estimate(average, len(values), moves, count > 1, limits)


def combination(value: float, parts: Iterable[tuple[float, Estimate]], limits: Limits = UNLIMITED) -> Estimate:
    """A figure made of several estimates.

    Args:
        value: the figure.
        parts: of each estimate, what the figure changes by for a small change of it (its weight in a weighted mean).
        limits: of the figure.
    """
    parts = list(parts)
    moves: dict[str, list[float]] = defaultdict(list)
    for slope, part in parts:
        for cluster, move in part.moves.items():
            moves[cluster].append(slope * move)
    return Estimate(
        value,
        sum(part.n for _, part in parts),
        {cluster: math.fsum(each) for cluster, each in moves.items()},
        all(part.has_error for _, part in parts),
        limits,
    )


def mean_of_estimates(estimates: Sequence[Estimate]) -> Estimate | None:
    """Every estimate counts alike, however many questions it has; None without any."""
    if not estimates:
        return None
    share = 1 / len(estimates)
    value = math.fsum(part.value for part in estimates) / len(estimates)
    limits = min(part.limits[0] for part in estimates), max(part.limits[1] for part in estimates)
    return combination(value, [(share, part) for part in estimates], limits)


@lru_cache(maxsize=1024)
def t_quantile(degrees: int) -> float:
    """Half width, in standard errors, of a 95 % interval with Student's t of so many degrees (1 or more): 2.776 for 4.

    The distribution has a closed form in the angle atan(t / sqrt(degrees)) (Abramowitz & Stegun, Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4), which is inverted by halving.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _coverage(middle, degrees) < 0.95:
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

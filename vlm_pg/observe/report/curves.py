"""Turning a metric of any length into few enough points to draw, without hiding its extremes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vlm_pg.observe.report.read import Series

MAX_POINTS = 1000


@dataclass(frozen=True)
class Curve:
    """What is drawn of one metric: at most ``MAX_POINTS`` steps with their value and its rolling mean.

    Curve("accuracy", (1, 2, 3), (0.0, 1.0, 0.5), (0.5, 0.5, 0.75))
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    smooth: tuple[float, ...]


def make_curve(name: str, series: Series, smooth: bool = True) -> Curve:
    """Smooth a series over all of its steps (if wanted), then keep the points worth drawing."""
    means = smoothed(series.values) if smooth else series.values
    kept = kept_points(series.values, MAX_POINTS)
    return Curve(
        name,
        tuple(series.steps[index] for index in kept),
        tuple(series.values[index] for index in kept),
        tuple(means[index] for index in kept),
    )


def window_of(num_points: int) -> int:
    """Width of one rolling mean: an odd number, about a thirtieth of the run; 1 (none) below 20 points."""
    return 2 * max(1, num_points // 60) + 1 if num_points >= 20 else 1


def smoothed(values: Sequence[float]) -> list[float]:
    """Two rolling means in a row: nearby steps weigh more, so one spike makes a bump and not a box."""
    window = window_of(len(values))
    return rolling_mean(rolling_mean(values, window), window)


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over ``window`` points; at the ends over those of them that exist.

    rolling_mean([0, 3, 6, 0], 3) == [1.5, 3, 3, 3]
    """
    if window == 1:  # the values themselves, without the rounding that sums would add
        return list(values)
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        first, end = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def kept_points(values: Sequence[float], limit: int) -> list[int]:
    """Indices to draw: all of them, or the smallest and largest value of each of ``limit / 2`` equal stretches.

    The first and the last point are always kept, so a spike, the start and the end survive.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    kept = {0, count - 1}
    stretches = limit // 2 - 1
    for stretch in range(stretches):
        indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        kept.add(min(indices, key=values.__getitem__))
        kept.add(max(indices, key=values.__getitem__))
    return sorted(kept)

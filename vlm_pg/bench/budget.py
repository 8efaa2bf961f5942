"""What a point will cost, judged by the points before it, and what is therefore left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vlm_pg.bench.grid import Point
from vlm_pg.memory import GIB

# Before anything is measured: operations per second of one CPU thread, of a GPU, and seconds to start a process.
CPU_THREAD_RATE, GPU_RATE = 5e10, 1e14
START_SECONDS = 15.0
# One point takes at most this share of the budget: the others have something to say too.
POINT_SHARE = 0.5

Formula = Callable[[str, Point], float]


@dataclass
class Estimator:
    """Scales formulas for operations and peak memory of a contestant's run by what was measured.

    ``seconds_seen``, ``memory_seen``: per contestant, (formula, measured) of earlier points.
    """

    flops: Formula
    peak: Formula
    first_rate: float
    start_seconds: float = START_SECONDS
    seconds_seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    memory_seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def learn(self, name: str, point: Point, seconds: float, peak_bytes: int | None) -> None:
        """Take in what a contestant needed for one run."""
        self.seconds_seen.setdefault(name, []).append((self.flops(name, point), seconds))
        if peak_bytes is not None:
            self.memory_seen.setdefault(name, []).append((self.peak(name, point), peak_bytes))

    def seconds(self, name: str, point: Point) -> float:
        """One run."""
        flops = self.flops(name, point)
        return flops * _nearest_factor(self.seconds_seen, name, flops, 1 / self.first_rate)

    def peak_bytes(self, name: str, point: Point) -> float:
        """Peak memory of one run."""
        peak = self.peak(name, point)
        return peak * _nearest_factor(self.memory_seen, name, peak, 1.0)


def _nearest_factor(seen: dict[str, list[tuple[float, float]]], name: str, formula: float, default: float) -> float:
    """Measured over formula at the nearest point of this contestant; of another one, the most expensive."""
    if name in seen:
        near = min(seen[name], key=lambda pair: abs(math.log(pair[0] / formula)))
        return near[1] / near[0]
    return max((measured / expected for pairs in seen.values() for expected, measured in pairs), default=default)


@dataclass(frozen=True)
class Plan:
    """Which contestants run at a point, why the others do not, and how long it will take."""

    contestants: list[str]
    skipped: dict[str, str]
    seconds: float


def plan_point(
    point: Point,
    contestants: Sequence[str],
    estimator: Estimator,
    runs: int,
    seconds_left: float | None,
    seconds_total: float | None,
    memory_limit: float | None,
) -> Plan:
    """Take contestants in order as long as they fit.

    Args:
        runs: per contestant: warm-up, repeats, and the memory run where there is one.
        seconds_left, seconds_total: of the budget; None without one.
        memory_limit: bytes a contestant may be expected to take, None for any.
    """
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    spent = estimator.start_seconds
    allowed = None
    if seconds_left is not None and seconds_total is not None:
        allowed = min(seconds_left, POINT_SHARE * seconds_total)
    for name in contestants:
        peak = estimator.peak_bytes(name, point)
        if memory_limit is not None and peak > memory_limit:
            skipped[name] = f"expected to need {peak / GIB:.1f} GiB, {memory_limit / GIB:.1f} GiB can be had"
            continue
        cost = runs * estimator.seconds(name, point)
        if allowed is not None and spent + cost > allowed:
            of = "left of the budget" if allowed == seconds_left else f"{POINT_SHARE:.0%} of the budget, a point's most"
            skipped[name] = f"expected to take {_words(cost)} on top of {_words(spent)}; {_words(allowed)} is {of}"
            continue
        chosen.append(name)
        spent += cost
    if len(chosen) == 1 and len(contestants) > 1:
        skipped[chosen[0]] = "nothing to compare it with: " + "; ".join(f"{n} {why}" for n, why in skipped.items())
        chosen = []
    return Plan(chosen, skipped, spent if chosen else 0.0)


def _words(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min"

"""Declarations of logged numbers: name, unit, reduction over ranks and updates, and chart.

A metric is declared by the code that computes it, and is the key of its value from there on: no central list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

# Own keys of a line of metrics.jsonl; no metric may have these names.
RESERVED_KEYS = ("step", "phase", "time")

How = Literal["sum", "mean", "largest", "smallest", "same"]


@dataclass(frozen=True)
class Chart:
    """A chart of the report, of all metrics that name its title.

    Args:
        position: order among the charts; those from 10 on are collapsed.
        as_percent: values are shares.
        smooth: draw a rolling mean over the values.
    """

    title: str
    position: int = 99
    as_percent: bool = False
    smooth: bool = True


# Of supervised training.
NLL_CHART = Chart("Negative log-likelihood of responses", 1)
DISTILLATION_CHART = Chart("Divergence from the teacher", 2)
# Of preference pairs.
PREFERENCE_CHART = Chart("Pairs ordered as preferred", 2, as_percent=True)
# A report names those of them that a run lacks.
MAIN_CHARTS = (
    REWARD_CHART := Chart("Reward", 1),
    SPREAD_CHART := Chart("Spread of the reward", 2),
    KL_CHART := Chart("KL to the reference policy", 3),
    ENTROPY_CHART := Chart("Entropy of the policy", 4),
    LENGTH_CHART := Chart("Response length", 5),
    NORM_CHART := Chart("Gradient norm", 6),
    SECONDS_CHART := Chart("Seconds per step", 7),
    SAVED_CHART := Chart("Tokens saved by sharing the prefix", 8, as_percent=True),
    THROUGHPUT_CHART := Chart("Throughput", 9),
)


class Metric(str):
    """A metric's name, with the rest of its declaration.

    Args:
        name: the logged name. One that ends in "/" is a family, see ``of``.
        unit: in words.
        how: reduction over ranks: "sum", "mean" (of weighted parts), "largest", "smallest"; "same": every rank has the
            whole value.
        over_updates: reduction over a step's updates. None: the sum of sums, the extreme of extremes, else the mean.
        chart: None for one of its own, under its name.
        of_nothing: the mean of no parts.
    """

    unit: str
    how: How
    over_updates: How
    chart: Chart | None
    of_nothing: float | None

    def __new__(
        cls,
        name: str,
        unit: str = "",
        how: How = "mean",
        chart: Chart | None = None,
        over_updates: How | None = None,
        of_nothing: float | None = 0.0,
    ) -> Self:
        metric = super().__new__(cls, name)
        metric.unit, metric.how, metric.chart, metric.of_nothing = unit, how, chart, of_nothing
        metric.over_updates = over_updates or ("mean" if how == "same" else how)
        return metric

    def of(self, name: str) -> Metric:
        """A member of the family: ``Metric("seconds/", "s").of("train")`` is the metric "seconds/train"."""
        return Metric(self + name, self.unit, self.how, self.chart, self.over_updates, self.of_nothing)

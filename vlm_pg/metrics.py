"""What a logged number is: name, unit, how ranks and updates put theirs together, and where it is drawn.

A metric is declared where it is made, and is the key of its value from there on: nothing else has to know of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

# Of a line of metrics.jsonl; no metric may be called so.
RESERVED_KEYS = ("step", "phase", "time")

How = Literal["sum", "mean", "largest", "smallest", "same"]


@dataclass(frozen=True)
class Chart:
    """A chart of the report: all metrics that name its title.

    Args:
        place: among the charts; from 10 on they are folded away.
        as_percent: values are shares.
        smooth: a rolling mean is drawn over the values.
    """

    title: str
    place: int = 99
    as_percent: bool = False
    smooth: bool = True


# What a report says is missing where it is.
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
        name: what it is logged as. One that ends in "/" stands for many, see ``of``.
        unit: in words for people.
        how: what the parts that ranks add up become: their "sum", their "mean" (each part with a weight), the "largest"
            or the "smallest" of them; "same": every rank has the whole value.
        over_updates: what a step makes of its updates' values. None: the sum of sums, the extreme of extremes, else
            the mean.
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
        """One of the many: ``Metric("seconds/", "s").of("train")`` is the metric "seconds/train"."""
        return Metric(self + name, self.unit, self.how, self.chart, self.over_updates, self.of_nothing)

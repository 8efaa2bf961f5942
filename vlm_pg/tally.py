"""Sums of metrics on this rank, and their reduction over ranks and updates as each metric declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from vlm_pg.distributed import SINGLE_RANK, RankLayout, gather_objects
from vlm_pg.metrics import How, Metric

Number = float | torch.Tensor


class Tally:
    """This rank's part of each metric.

    Tensors stay on their device, as fp64 scalars: reading one would synchronize the host with the device.
    """

    def __init__(self) -> None:
        self._parts: dict[Metric, tuple[Number, float]] = {}

    def add(self, metric: Metric, value: Number, weight: float = 1.0) -> None:
        """Add a part. Of a mean, ``value`` is a sum over ``weight`` items."""
        wide = value.double() if isinstance(value, torch.Tensor) else float(value)
        start = (0.0, 0.0) if metric.how in ("sum", "mean") else (wide, 0.0)
        before, weights = self._parts.get(metric, start)
        self._parts[metric] = _together(metric.how, before, wide), weights + weight

    def add_all(self, values: Mapping[Metric, Number], weight: float = 1.0) -> None:
        """Add a part of each metric."""
        for metric, value in values.items():
            self.add(metric, value, weight)

    def total(self, metric: Metric) -> float:
        """This rank's sum of a metric of plain numbers."""
        return float(self._parts.get(metric, (0.0, 0.0))[0])

    def reduced(self, ranks: RankLayout = SINGLE_RANK) -> dict[str, Any]:
        """Every metric of any rank, reduced over ranks: float, or None of no parts. A collective.

        ``ranks``: SP ranks hold the parts of their DP rank; each DP rank counts once.
        """
        found: dict[Metric, tuple[Any, float]] = {}
        for of_rank in ranks.of_data_ranks(gather_objects(self._on_host())):
            for metric, (value, weight) in of_rank.items():
                before = found.get(metric)
                if before is None:
                    found[metric] = value, weight
                elif metric.how != "same":  # which keeps the first rank's
                    found[metric] = _together(metric.how, before[0], value), before[1] + weight
        return {metric: _finished(metric, *parts) for metric, parts in found.items()}

    def _on_host(self) -> dict[Metric, tuple[float, float]]:
        """The parts as floats; one transfer for all tensors."""
        tensors = [value for value, _ in self._parts.values() if isinstance(value, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else ())
        return {
            metric: (next(read) if isinstance(value, torch.Tensor) else value, weight)
            for metric, (value, weight) in self._parts.items()
        }


def over_updates(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step, reduced over those of its updates."""
    joined: dict[str, float] = {}
    for metric in dict.fromkeys(metric for of_update in values for metric in of_update):
        found = [of_update[metric] for of_update in values if metric in of_update]
        how = metric.over_updates if isinstance(metric, Metric) else "mean"
        if how in ("sum", "mean"):
            joined[metric] = sum(found) / (len(found) if how == "mean" else 1)
        else:
            joined[metric] = reduce(partial(_together, how), found)
    return joined


def _together(how: How, first: Any, second: Any) -> Any:
    if how in ("sum", "mean"):
        return first + second
    if how == "same":
        return second
    if isinstance(first, torch.Tensor):
        return (torch.maximum if how == "largest" else torch.minimum)(first, second)
    return max(first, second) if how == "largest" else min(first, second)


def _finished(metric: Metric, value: float, weight: float) -> float | None:
    if metric.how != "mean":
        return value
    return value / weight if weight else metric.of_nothing

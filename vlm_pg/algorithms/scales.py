"""Baselines (what is subtracted from a reward) and scales (what its difference from it is divided by), by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from vlm_pg.algorithms.settings import AdvantageScale, Baseline

STD_EPSILON = 1e-4
WHITEN_EPSILON = 1e-8

# Rewards of one group; None: no value, which is left out of every statistic.
Rewards = Sequence[float | None]
FromBaseline = Callable[[Rewards], list[float | None]]
# All groups' rewards, their differences from the baseline and its name, to what is subtracted from all differences and
# what those of each group are divided by.
Scale = Callable[[Sequence[Rewards], Sequence[Rewards], Baseline], tuple[float, list[float]]]


def from_group_mean(rewards: Rewards, factor: float = 1.0) -> list[float | None]:
    valued = _valued([rewards])
    if len(valued) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = _mean(valued)
    return [None if reward is None else factor * (reward - mean) for reward in rewards]


def from_others_mean(rewards: Rewards) -> list[float | None]:
    """r_i minus the mean of the n - 1 others is n / (n - 1) times r_i minus the mean of all."""
    valued = len(_valued([rewards]))
    return from_group_mean(rewards, valued / (valued - 1) if valued > 1 else 1.0)


def by_group_std(groups: Sequence[Rewards], _: Sequence[Rewards], __: Baseline) -> tuple[float, list[float]]:
    return 0.0, [_sample_std(_valued([rewards])) + STD_EPSILON for rewards in groups]


def by_batch_std(groups: Sequence[Rewards], _: Sequence[Rewards], __: Baseline) -> tuple[float, list[float]]:
    return 0.0, [_sample_std(_valued(groups)) + STD_EPSILON] * len(groups)


def whitening(_: Sequence[Rewards], differences: Sequence[Rewards], baseline: Baseline) -> tuple[float, list[float]]:
    valued = _valued(differences)
    # Differences from a group's baseline add up to 0; rounding must not move a group without spread away from it.
    mean = _mean(valued) if baseline == "none" else 0.0
    return mean, [_sample_std(valued) + WHITEN_EPSILON] * len(differences)


def by_nothing(groups: Sequence[Rewards], _: Sequence[Rewards], __: Baseline) -> tuple[float, list[float]]:
    return 0.0, [1.0] * len(groups)


def _valued(groups: Sequence[Rewards]) -> list[float]:
    return [reward for rewards in groups for reward in rewards if reward is not None]


def _mean(values: Sequence[float]) -> float:
    """Exactly the common value where all are equal; 0 of none."""
    if not values:
        return 0.0
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _sample_std(values: Sequence[float]) -> float:
    """Divisor n - 1; 0 of fewer than two values, and exactly 0 where all are equal."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)


BASELINES: Mapping[Baseline, FromBaseline] = {
    "group_mean": from_group_mean,
    "leave_one_out": from_others_mean,
    "none": list,
}
SCALES: Mapping[AdvantageScale, Scale] = {
    "std": by_group_std,
    "batch": by_batch_std,
    "whiten": whitening,
    "none": by_nothing,
}

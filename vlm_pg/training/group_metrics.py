"""What a step's groups say about rewards, lengths and pruning, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlm_pg.metrics import LENGTH_CHART, REWARD_CHART, SPREAD_CHART, Chart, Metric
from vlm_pg.tally import Tally
from vlm_pg.training.group_advantages import kept_tokens
from vlm_pg.training.group_rewards import has_spread
from vlm_pg.types import RolloutGroup

_SPREAD = "standard deviation within a group, mean"
_SHORT = Chart("Responses cut off, rewards without value", 17, as_percent=True)
REWARD = Metric("reward", "mean over rollouts", chart=REWARD_CHART, of_nothing=None)
REWARD_PART = Metric("reward/", "mean over rollouts", chart=REWARD_CHART, of_nothing=None)
REWARD_STD = Metric("reward_std", _SPREAD, chart=SPREAD_CHART)
REWARD_PART_STD = Metric("reward_std/", _SPREAD, chart=Chart("Spread by part", 14))
GROUPS = Metric("groups", "groups", "sum")
WITHOUT_SPREAD = Metric(
    "groups_without_spread", "equal rewards, no gradient", chart=Chart("Groups without spread", 18, as_percent=True)
)
RESPONSE_LENGTH = Metric("response_tokens_mean", "tokens, mean", chart=LENGTH_CHART)
TRUNCATED = Metric("truncated_share", "share", chart=_SHORT)
NO_VALUE = Metric("no_value_share", "share", chart=_SHORT)
PRUNED = Metric("pruned_share", "share", chart=Chart("Pruned rollouts", 15, as_percent=True))
KEPT_TOKENS = Metric("kept_tokens", "tokens", "sum")


def group_metrics(sampled: Sequence[RolloutGroup], training: Sequence[RolloutGroup]) -> dict[str, float | None]:
    """The step's metrics, None where nothing had a value. A collective.

    Args:
        sampled: all complete groups of the step on this rank.
        training: those that train, pruned rollouts among them.
    """
    tally = Tally()
    for group in sampled:
        for name, values in _values_by_part(group).items():
            tally.add(REWARD_PART.of(name) if name else REWARD, math.fsum(values), len(values))
            if len(values) > 1:
                tally.add(REWARD_PART_STD.of(name) if name else REWARD_STD, _std(values))
        rollouts = len(group.rollouts)
        tally.add(GROUPS, 1)
        tally.add(WITHOUT_SPREAD, not has_spread(group))
        tally.add(RESPONSE_LENGTH, sum(len(rollout.token_ids) for rollout in group.rollouts), rollouts)
        tally.add(TRUNCATED, sum(rollout.finish_reason == "length" for rollout in group.rollouts), rollouts)
        tally.add(NO_VALUE, sum(reward.total is None for reward in group.rewards), rollouts)
        tally.add(PRUNED, sum(weight == 0 for weight in group.kept), len(group.kept))
    for metric in (GROUPS, WITHOUT_SPREAD, RESPONSE_LENGTH, TRUNCATED, NO_VALUE, PRUNED):
        tally.add(metric, 0, 0)  # known, even where there is no group
    tally.add(KEPT_TOKENS, sum(map(kept_tokens, training)))
    found = tally.reduced()
    return {name: found[name] for name in sorted(found, key=_order)}


def _values_by_part(group: RolloutGroup) -> dict[str, list[float]]:
    """Values of the total ("") and of each part ("accuracy"), without those that have none."""
    found: dict[str, list[float]] = {"": []}
    for reward in group.rewards:
        for name, value in {"": reward.total, **reward.parts}.items():
            values = found.setdefault(name, [])
            if value is not None:
                values.append(value)
    return found


def _order(name: str) -> tuple[int, str]:
    """The total first, then the parts that every run has, then the others."""
    first = ("reward", "reward/accuracy", "reward/format")
    return (first.index(name), "") if name in first else (3, name) if name.startswith("reward/") else (4, "")


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))

"""What a step's groups say about rewards, lengths and pruning, over all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from vlm_pg.training.group_advantages import kept_tokens
from vlm_pg.training.group_rewards import has_spread
from vlm_pg.types import RolloutGroup


def group_sums(sampled: Sequence[RolloutGroup], training: Sequence[RolloutGroup]) -> dict[str, float]:
    """Sums over this rank's groups from which the step's metrics are made; what is 0 may be absent.

    Args:
        sampled: all complete groups of the step.
        training: those that train, pruned rollouts among them.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for group in training:
        sums["kept_tokens"] += kept_tokens(group)
    for group in sampled:
        sums["pruned"] += sum(weight == 0 for weight in group.kept)
        sums["prunable"] += len(group.kept)
        sums["groups"] += 1
        sums["no_spread"] += not has_spread(group)
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            sums["rollouts"] += 1
            sums["tokens"] += len(rollout.token_ids)
            sums["truncated"] += rollout.finish_reason == "length"
            sums["no_value"] += reward.total is None
        for name, values in _values_by_part(group).items():
            sums[f"part/{name}"] += 0  # known, even where nothing has a value
            if values:
                sums[f"sum/{name}"] += math.fsum(values)
                sums[f"n/{name}"] += len(values)
            if len(values) > 1:
                sums[f"std/{name}"] += _std(values)
                sums[f"std_n/{name}"] += 1
    return dict(sums)


def group_metrics(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float | None]:
    """The step's metrics from the sums of all ranks; None where nothing had a value.

    ``reward`` and ``reward/<part>`` are means over rollouts; ``reward_std`` and ``reward_std/<part>`` are means over
    groups of the sample standard deviation within one.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for of_rank in of_ranks:
        for name, value in of_rank.items():
            sums[name] += value
    names = sorted(name.removeprefix("part/") for name in sums if name.startswith("part/"))
    rollouts = max(1.0, sums["rollouts"])
    metrics: dict[str, float | None] = {}
    for name in sorted(names, key=_order):
        metrics[name] = sums[f"sum/{name}"] / sums[f"n/{name}"] if sums[f"n/{name}"] else None
    for name in sorted(names, key=_order):
        if sums[f"std_n/{name}"]:
            metrics[name.replace("reward", "reward_std", 1)] = sums[f"std/{name}"] / sums[f"std_n/{name}"]
    return metrics | {
        "groups": float(sums["groups"]),
        "groups_without_spread": sums["no_spread"] / max(1.0, sums["groups"]),
        "response_tokens_mean": sums["tokens"] / rollouts,
        "truncated_share": sums["truncated"] / rollouts,
        "no_value_share": sums["no_value"] / rollouts,
        "pruned_share": sums["pruned"] / max(1.0, sums["prunable"]),
        "kept_tokens": float(sums["kept_tokens"]),
    }


def _values_by_part(group: RolloutGroup) -> dict[str, list[float]]:
    """Values of the total ("reward") and of each part ("reward/accuracy"), without those that have none."""
    found: dict[str, list[float]] = {"reward": []}
    for reward in group.rewards:
        for name, value in {
            "reward": reward.total,
            **{f"reward/{part}": v for part, v in reward.parts.items()},
        }.items():
            values = found.setdefault(name, [])
            if value is not None:
                values.append(value)
    return found


def _order(name: str) -> tuple[int, str]:
    """The total first, then the parts that every run has."""
    first = ("reward", "reward/accuracy", "reward/format")
    return (first.index(name) if name in first else len(first), name)


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))

"""Rewards to advantages: a baseline (what is subtracted) and a scale (what is divided by), of a group or of the step.

GRPO (arXiv 2402.03300, equation 3) is ``group_mean`` and ``std``, Dr. GRPO (2503.20783) ``group_mean`` and ``none``,
RLOO (2402.14740, section 2) ``leave_one_out`` and ``none``, REINFORCE++ (2501.03262) ``none`` and ``whiten``, and its
variant with a baseline ``group_mean`` and ``whiten``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vlm_pg.algorithms.scales import BASELINES, SCALES, Rewards
from vlm_pg.algorithms.settings import OF_STEP, AdvantageScale, AlgorithmSettings, Baseline


@dataclass(frozen=True)
class GroupRewards:
    """What an advantage estimator knows of one complete group of G rollouts.

    Attributes:
        totals: reward of each rollout; None: no value.
        parts: part of the reward -> its value for each rollout, unweighted.
        weights: part -> its weight in the total, without those of weight 0.
        lengths: response tokens of each rollout.
    """

    totals: tuple[float | None, ...]
    parts: Mapping[str, tuple[float | None, ...]]
    weights: Mapping[str, float]
    lengths: tuple[int, ...]


def baseline_and_scale(groups: Sequence[GroupRewards], settings: AlgorithmSettings) -> list[list[float]]:
    """Advantages by ``baseline`` and ``scale_advantages``, of totals or (``normalise_parts``) part by part.

    Args:
        groups: all of the step on all ranks, where the scale is one of ``OF_STEP``.
    """
    how = (settings.baseline, effective_scale(settings))
    if not groups:
        return []
    if not settings.normalise_parts:
        return batch_advantages([group.totals for group in groups], *how)
    weights = groups[0].weights
    names = sorted({name for group in groups for name in group.parts if name in weights})
    parts = {name: [group.parts.get(name, (None,) * len(group.totals)) for group in groups] for name in names}
    return part_advantages(parts, {name: weights[name] for name in names}, *how)


def effective_scale(settings: AlgorithmSettings) -> AdvantageScale:
    """Token advantages are whitened once, after the KL has been taken away: not here."""
    scale = settings.scale_advantages
    by_token = settings.kl_coef > 0 and settings.kl_in == "token_reward"
    return "none" if scale == "whiten" and by_token else scale


def group_advantages(rewards: Rewards, baseline: Baseline, scale: AdvantageScale) -> list[float]:
    """Advantage of each rollout of one complete group, from that group alone.

    A_i = r_i - b_i with ``scale="none"``, (r_i - b_i) / (std + 1e-4) with ``"std"``. b_i is the mean of the group with
    ``baseline="group_mean"``, that of the group's other rollouts with ``"leave_one_out"``, 0 with ``"none"``. ``std``
    is the sample standard deviation (divisor n - 1; 0 of a single value). A reward of None ("no value") is left out of
    every statistic and gets advantage 0. With a baseline, fewer than two valued rewards, or rewards that are all equal,
    give exactly 0 for everyone: such a group does not say which rollout was better.

        group_advantages([1.0, 0.0, None, 0.5], "group_mean", "none") -> [0.5, -0.5, 0.0, 0.0]
        group_advantages([1.0, 0.0, None, 0.5], "leave_one_out", "none") -> [0.75, -0.75, 0.0, 0.0]

    Args:
        rewards: total reward of each of the group's G rollouts, None where it could not be computed.
        baseline: ``"group_mean"``, ``"leave_one_out"`` or ``"none"``.
        scale: ``"std"`` or ``"none"``; the others need the whole step, see ``batch_advantages``.

    Returns:
        G advantages, in the order of ``rewards``.

    Raises:
        ValueError: a reward is not finite, or ``baseline`` or ``scale`` is unknown or needs more than one group.
    """
    if scale in OF_STEP:
        raise ValueError(
            f"Advantage scale {scale!r} needs all groups of the step. One group allows std, none. "
            "Call batch_advantages with the groups of all ranks."
        )
    return batch_advantages([rewards], baseline, scale)[0]


def batch_advantages(groups: Sequence[Rewards], baseline: Baseline, scale: AdvantageScale) -> list[list[float]]:
    """Advantages of all groups of a step; ``group_advantages`` for each of them, and two scales over all of them.

    ``batch``: divided by the sample standard deviation of all valued rewards of the step + 1e-4 (TRL's
    ``scale_rewards="batch"``). ``whiten``: the differences from the baseline get the step's mean 0, and are divided by
    their sample standard deviation over all valued rollouts of the step + 1e-8.

    A group without spread has differences of 0 from its baseline. Its advantages are exactly 0 with ``batch``, and with
    ``whiten`` too, since differences from a group's baseline have mean 0; there its zeros count in the deviation, as in
    REINFORCE++ with a baseline.

    With ``baseline="none"`` nothing is centred unless it is whitened: with ``std`` and ``batch``, equal rewards r of
    all rollouts give r / 1e-4.

    Args:
        groups: rewards of each complete group of the step, of all ranks for ``batch`` and ``whiten``.
        baseline: see ``group_advantages``.
        scale: ``"std"``, ``"batch"``, ``"whiten"`` or ``"none"``.

    Returns:
        Advantages of each group, in the order of ``groups``.

    Raises:
        ValueError: a reward is not finite, or ``baseline`` or ``scale`` is unknown.
    """
    _require_known("baseline", baseline, BASELINES, "algorithm.baseline")
    _require_known("advantage scale", scale, SCALES, "algorithm.scale_advantages")
    for rewards in groups:
        _require_finite(rewards)
    differences = [BASELINES[baseline](rewards) for rewards in groups]
    mean, divisors = SCALES[scale](groups, differences, baseline)
    return [
        [0.0 if difference is None else (difference - mean) / divisor for difference in group]
        for group, divisor in zip(differences, divisors, strict=True)
    ]


def part_advantages(
    parts: Mapping[str, Sequence[Rewards]], weights: Mapping[str, float], baseline: Baseline, scale: AdvantageScale
) -> list[list[float]]:
    """Advantages of each part of the reward by itself, added up with the parts' weights.

    So a part with a small spread counts as much as one with a large spread (with the scales ``std``, ``batch`` and
    ``whiten``). A rollout of which a weighted part is None has no total: it gets advantage 0 and enters no statistic
    of any part. Parts of weight 0 are not looked at.

    Args:
        parts: part -> its values, unweighted: those of each rollout of each group of the step.
        weights: part -> its weight, for every part.
        baseline: see ``group_advantages``.
        scale: see ``batch_advantages``.

    Returns:
        Advantages of each group.

    Raises:
        ValueError: ``parts`` and ``weights`` have other names or ``parts`` other shapes; and what ``batch_advantages``
            refuses.
    """
    if not parts or set(parts) != set(weights):
        raise ValueError(
            f"Parts are {sorted(parts)}, weights are given for {sorted(weights)}. Both must name the same parts, at "
            "least one. Give a part that shall not count the weight 0."
        )
    shapes = {name: [len(rewards) for rewards in groups] for name, groups in parts.items()}
    shape = next(iter(shapes.values()))
    if any(other != shape for other in shapes.values()):
        raise ValueError(
            f"Rollouts in each group are, by part, {shapes}. They must be the same for all parts. "
            "Pass None for a rollout of which a part has no value."
        )
    weighted = {name: weight for name, weight in weights.items() if weight != 0.0}
    complete = [
        [all(parts[name][group][i] is not None for name in weighted) for i in range(num_rollouts)]
        for group, num_rollouts in enumerate(shape)
    ]
    totals = [[0.0] * num_rollouts for num_rollouts in shape]
    for name, weight in weighted.items():
        values = [
            [value if whole else None for value, whole in zip(rewards, of_group, strict=True)]
            for rewards, of_group in zip(parts[name], complete, strict=True)
        ]
        for total, advantages in zip(totals, batch_advantages(values, baseline, scale), strict=True):
            total[:] = [so_far + weight * advantage for so_far, advantage in zip(total, advantages, strict=True)]
    return totals


def _require_known(what: str, value: str, allowed: Iterable[str], setting: str) -> None:
    if value not in allowed:
        raise ValueError(f"Unknown {what} {value!r}. Allowed are {', '.join(allowed)}. Set {setting} to one of them.")


def _require_finite(rewards: Rewards) -> None:
    if not all(math.isfinite(reward) for reward in rewards if reward is not None):
        raise ValueError(
            f"Rewards of one group are {list(rewards)}. Each must be a finite number or None. "
            "Return None from a reward that cannot be computed."
        )

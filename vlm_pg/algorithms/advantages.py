"""Rewards to advantages: a baseline (what is subtracted) and a scale (what is divided by), of a group or of the step.

GRPO (arXiv 2402.03300, equation 3) is ``group_mean`` and ``std``, Dr. GRPO (2503.20783) ``group_mean`` and ``none``,
RLOO (2402.14740, section 2) ``leave_one_out`` and ``none``, REINFORCE++ (2501.03262) ``none`` and ``whiten``, and its
variant with a baseline ``group_mean`` and ``whiten``. Advantages by token: the KL taken from each, and whitening over
all response tokens of a step. Before that: what is added to a reward on account of the rest of the group or of the
response's length. Shape letters: R tokens of one response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.algorithms.settings import AdvantageScale, AlgorithmSettings, Baseline

STD_EPSILON = 1e-4
WHITEN_EPSILON = 1e-8
# Relative rounding of float32 after a few operations, also of a log-probability of the order of 1 to 10 nats.
FP32_ROUNDING = 1e-6

# Rewards of one group; None: no value, which is left out of every statistic.
Rewards = Sequence[float | None]


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


def batch_advantages(groups: Sequence[Rewards], baseline: Baseline, scale: AdvantageScale) -> list[list[float]]:
    """Advantage of each rollout of each complete group.

    A_i = r_i - b_i, divided by what ``scale`` says. b_i is the mean of the group with ``baseline="group_mean"``, that
    of the group's other rollouts with ``"leave_one_out"``, 0 with ``"none"``.

    ``std``: divided by the group's sample standard deviation (divisor n - 1; 0 of a single value) + 1e-4. ``batch``: by
    that of all valued rewards of the step + 1e-4 (TRL's ``scale_rewards="batch"``). ``whiten``: the differences from
    the baseline get the step's mean 0, and are divided by their sample standard deviation over all valued rollouts of
    the step + 1e-8. ``none``: undivided.

    A reward of None ("no value") is left out of every statistic and gets advantage 0. With a baseline, fewer than two
    valued rewards, or rewards that are all equal, give exactly 0 for everyone: such a group does not say which rollout
    was better; with ``whiten`` its zeros count in the deviation, as in REINFORCE++ with a baseline. With
    ``baseline="none"`` nothing is centred unless it is whitened: equal rewards r give r / 1e-4 with ``std``.

        batch_advantages([[1.0, 0.0, None, 0.5]], "group_mean", "none") -> [[0.5, -0.5, 0.0, 0.0]]
        batch_advantages([[1.0, 0.0, None, 0.5]], "leave_one_out", "none") -> [[0.75, -0.75, 0.0, 0.0]]

    Args:
        groups: rewards of each complete group; for ``batch`` and ``whiten`` all of the step, of all ranks.

    Raises:
        ValueError: a reward is not finite.
    """
    for rewards in groups:
        if not all(math.isfinite(reward) for reward in rewards if reward is not None):
            raise ValueError(
                f"Rewards of one group are {list(rewards)}. Each must be a finite number or None. "
                "Return None from a reward that cannot be computed."
            )
    differences = [_differences(rewards, baseline) for rewards in groups]
    mean, divisors = _scaling(groups, differences, baseline, scale)
    return [
        [0.0 if difference is None else (difference - mean) / divisor for difference in group]
        for group, divisor in zip(differences, divisors, strict=True)
    ]


def part_advantages(
    parts: Mapping[str, Sequence[Rewards]], weights: Mapping[str, float], baseline: Baseline, scale: AdvantageScale
) -> list[list[float]]:
    """Advantages of each part of the reward by itself, added up with the parts' weights.

    So a part with a small spread counts as much as one with a large spread (with the scales ``std``, ``batch`` and
    ``whiten``). A rollout of which a part is None has no total: it gets advantage 0 and enters no statistic.

    Args:
        parts: part -> its values, unweighted: those of each rollout of each group of the step.
        weights: part -> its weight, not 0, for every part.
    """
    shape = [len(rewards) for rewards in next(iter(parts.values()))]
    complete = [
        [all(groups[group][i] is not None for groups in parts.values()) for i in range(num_rollouts)]
        for group, num_rollouts in enumerate(shape)
    ]
    totals = [[0.0] * num_rollouts for num_rollouts in shape]
    for name, groups in parts.items():
        values = [
            [value if whole else None for value, whole in zip(rewards, of_group, strict=True)]
            for rewards, of_group in zip(groups, complete, strict=True)
        ]
        for total, advantages in zip(totals, batch_advantages(values, baseline, scale), strict=True):
            total[:] = [so_far + weights[name] * one for so_far, one in zip(total, advantages, strict=True)]
    return totals


def _differences(rewards: Rewards, baseline: Baseline) -> list[float | None]:
    """Rewards of one group minus the baseline; 0 where fewer than two have a value."""
    if baseline == "none":
        return list(rewards)
    valued = _valued([rewards])
    mean, count = _mean(valued), len(valued)
    # r_i minus the mean of the n - 1 others is n / (n - 1) times r_i minus the mean of all.
    factor = count / (count - 1) if baseline == "leave_one_out" and count > 1 else 1.0
    return [None if reward is None else factor * (reward - mean) if count > 1 else 0.0 for reward in rewards]


def _scaling(
    groups: Sequence[Rewards], differences: Sequence[Rewards], baseline: Baseline, scale: AdvantageScale
) -> tuple[float, list[float]]:
    """What is subtracted from all differences, and the divisor of each group."""
    if scale == "std":
        return 0.0, [_sample_std(_valued([rewards])) + STD_EPSILON for rewards in groups]
    if scale == "batch":
        return 0.0, [_sample_std(_valued(groups)) + STD_EPSILON] * len(groups)
    if scale == "whiten":
        valued = _valued(differences)
        # Differences from a group's baseline add up to 0; rounding must not move a group without spread away from it.
        mean = _mean(valued) if baseline == "none" else 0.0
        return mean, [_sample_std(valued) + WHITEN_EPSILON] * len(groups)
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


def kl_returns(kl: torch.Tensor, coef: float) -> torch.Tensor:
    """What each token's advantage loses to the KL of itself and all tokens after it (REINFORCE++, section 3).

        kl_returns([1, 2, 3], 0.1) -> [-0.6, -0.5, -0.3]

    Args:
        kl: [R] KL estimate of each token of one response, in nats, without graph.

    Returns:
        [R] -coef * sum of kl[s] over s >= t.
    """
    return -coef * kl.flip(0).cumsum(0).flip(0)


def moments(values: Sequence[torch.Tensor]) -> tuple[float, float, float]:
    """(count, sum, sum of squares) of all elements, in float64; those of several ranks may be added up."""
    wide = [tensor.double() for tensor in values]
    return (
        float(sum(tensor.numel() for tensor in wide)),
        math.fsum(tensor.sum().item() for tensor in wide),
        math.fsum(tensor.square().sum().item() for tensor in wide),
    )


def mean_and_std(count: float, total: float, squares: float) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor count - 1) from added-up ``moments``; 0 of a single value or none."""
    mean = total / count if count else 0.0
    # Rounding may leave slightly less than 0 where all values are equal.
    variance = max(0.0, squares - total * mean) / (count - 1) if count > 1 else 0.0
    return mean, math.sqrt(variance)


def whitened(values: torch.Tensor, mean: float, std: float, rounding: float) -> torch.Tensor:
    """(values - mean) / (std + 1e-8): token advantages whitened over all response tokens of a step.

    Zeros where the deviation is rounding and nothing else: divided by itself it would be a full-size update.

    Args:
        mean, std: of all tokens of the step on all ranks, see ``mean_and_std``.
        rounding: deviation that equal rewards may have, see ``token_rounding``.
    """
    return values * 0.0 if std <= rounding else (values - mean) / (std + WHITEN_EPSILON)


def token_rounding(largest: float, kl_coef: float, longest: int) -> float:
    """How far token advantages may lie apart by rounding alone: of fp32, and of the KL's log-probabilities.

    Args:
        largest: absolute value of the step's largest advantage before the KL is taken away.
        longest: tokens of the longest response, over which the KL sums up.
    """
    return FP32_ROUNDING * (largest + kl_coef * longest)


# Means of whole numbers of right answers are compared; 3 / 5 shall count as 0.8 times 3 / 4.
ROUNDING = 1e-9


def temporal_bonus(
    accuracies: Sequence[float | None],
    control_accuracies: Sequence[float | None],
    *,
    bonus: float,
    ratio: float,
    right_above: float,
) -> list[float]:
    """Bonus of each rollout of a video question (T-GRPO, Video-R1, arXiv 2503.21776, section 3).

    Right answers get ``bonus`` if the group's mean accuracy is at least ``ratio`` times that of a control group, which
    saw the same frames in a random order. Means are over what has a value. Without any valued control there is no
    bonus, as nothing shows that the order of the frames was of use.

        accuracies [1, 0, 1, 0], control [1, 0], ratio 0.8: 0.5 >= 0.4, so [bonus, 0, bonus, 0]

    Args:
        accuracies: of each rollout of the group; None: no value, no bonus.
        control_accuracies: of each rollout of the control group.
        right_above: an answer is right if its accuracy is above this.
    """
    valued = (_valued([values]) for values in (accuracies, control_accuracies))
    group_mean, control_mean = (math.fsum(values) / len(values) if values else None for values in valued)
    earned = group_mean is not None and control_mean is not None and group_mean >= ratio * control_mean - ROUNDING
    return [bonus if earned and _is_right(accuracy, right_above) else 0.0 for accuracy in accuracies]


def length_bonus(
    accuracies: Sequence[float | None],
    lengths: Sequence[int],
    *,
    bonus: float,
    tokens: tuple[int, int],
    right_above: float,
) -> list[float]:
    """Bonus of each rollout for a right answer of a wanted length (Video-R1, arXiv 2503.21776, section 3).

    Only in groups with more than one right answer.

    Args:
        accuracies: of each rollout of the group; None: no value, no bonus.
        lengths: response tokens of each rollout.
        tokens: shortest and longest response that gets it, both included.
        right_above: an answer is right if its accuracy is above this.
    """
    low, high = tokens
    right = [_is_right(accuracy, right_above) for accuracy in accuracies]
    several = sum(right) > 1
    return [
        bonus if several and is_right and low <= length <= high else 0.0
        for is_right, length in zip(right, lengths, strict=True)
    ]


def overlong_penalty(length: int, max_new_tokens: int, share: float, penalty: float, truncated: bool) -> float:
    """Soft punishment of long responses, at most 0, to be added to the reward (DAPO, arXiv 2503.14476, equation 13).

    0 up to (1 - share) * max_new_tokens, from there linear to -penalty at max_new_tokens. A truncated response gets
    -penalty. With ``share`` 0 there is no punishment of any response.

        overlong_penalty(90, 100, 0.2, 1.0, False) -> -0.5

    Args:
        length: response tokens.
        share: last share of ``max_new_tokens`` in which the punishment grows, in [0, 1).
        truncated: whether the response was cut off.
    """
    if share == 0.0:
        return 0.0
    if truncated:
        return -penalty
    punished = share * max_new_tokens
    over = length - (max_new_tokens - punished)
    return -penalty * min(1.0, over / punished) if over > 0 else 0.0


def _is_right(accuracy: float | None, right_above: float) -> bool:
    return accuracy is not None and accuracy > right_above

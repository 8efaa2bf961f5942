"""From rewards to advantages, over all ranks where the statistics are the whole step's, and what of it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from vlm_pg.algorithms.advantages import GroupRewards, kl_returns, mean_and_std, moments, token_rounding, whitened
from vlm_pg.algorithms.own import load_estimator
from vlm_pg.algorithms.pruning import prune
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.distributed import RankLayout, gather_objects, max_over_ranks, sum_over_ranks
from vlm_pg.training.dealing import step_order
from vlm_pg.training.group_rewards import SHAPED_PARTS
from vlm_pg.types import RolloutGroup


def advantage_groups(
    groups: Sequence[RolloutGroup], algorithm: AlgorithmSettings, part_weights: Mapping[str, float], ranks: RankLayout
) -> list[RolloutGroup]:
    """The groups with the advantage of every rollout. A collective where statistics are the whole step's.

    Args:
        part_weights: weight of each part of the reward.
    """
    estimator = load_estimator(algorithm)
    weights = {name: weight for name, weight in part_weights.items() if weight} | dict.fromkeys(SHAPED_PARTS, 1.0)
    here = [(group.order, _rewards_of(group, weights)) for group in groups]
    everywhere = gather_objects(here) if estimator.of_step else [here]
    numbers = step_order([[order for order, _ in of_rank] for of_rank in everywhere])
    rewards = {
        number: of_group
        for of_numbers, of_rank in zip(numbers, everywhere, strict=True)
        for number, (_, of_group) in zip(of_numbers, of_rank, strict=True)
    }
    if not rewards:
        return []
    advantages = estimator.of_groups([rewards[number] for number in range(len(rewards))])
    mine = numbers[ranks.rank if estimator.of_step else 0]
    return [replace(group, advantages=tuple(advantages[number])) for group, number in zip(groups, mine, strict=True)]


def _rewards_of(group: RolloutGroup, weights: Mapping[str, float]) -> GroupRewards:
    names = {name for reward in group.rewards for name in reward.parts}
    return GroupRewards(
        totals=tuple(reward.total for reward in group.rewards),
        parts={name: tuple(reward.parts.get(name) for reward in group.rewards) for name in sorted(names)},
        weights=weights,
        lengths=tuple(len(rollout.token_ids) for rollout in group.rollouts),
    )


def token_advantage_groups(
    groups: Sequence[RolloutGroup],
    kl: Sequence[Sequence[torch.Tensor]],
    algorithm: AlgorithmSettings,
    device: torch.device,
) -> list[RolloutGroup]:
    """The groups with advantages by token: each loses the KL from it to the response's end. A collective.

    With ``scale_advantages=whiten`` it is these that get mean 0 and deviation 1, over all tokens of all ranks. A
    response whose reward has no value takes no part and gets 0.

    Args:
        kl: per token [R] of each rollout of each group.
    """
    of_groups = [
        [
            torch.zeros_like(values)
            if reward.total is None
            else advantage + kl_returns(values, algorithm.kl_coef).float()
            for reward, advantage, values in zip(group.rewards, group.advantages, of_group, strict=True)
        ]
        for group, of_group in zip(groups, kl, strict=True)
    ]
    if algorithm.scale_advantages == "whiten":
        valued = [[reward.total is not None for reward in group.rewards] for group in groups]
        counted = [v for vs, oks in zip(of_groups, valued, strict=True) for v, ok in zip(vs, oks, strict=True) if ok]
        count, total, squares = moments(counted)
        sums = sum_over_ranks({"count": count, "total": total, "squares": squares}, device)
        mean, std = mean_and_std(sums["count"], sums["total"], sums["squares"])
        extremes = {
            "largest": max((abs(advantage) for group in groups for advantage in group.advantages), default=0.0),
            "longest": float(max((len(values) for values in counted), default=0)),
        }
        extremes = max_over_ranks(extremes, device)
        rounding = token_rounding(extremes["largest"], algorithm.kl_coef, int(extremes["longest"]))
        of_groups = [
            [whitened(v, mean, std, rounding) if ok else v for v, ok in zip(vs, oks, strict=True)]
            for vs, oks in zip(of_groups, valued, strict=True)
        ]
    return [replace(group, token_advantages=tuple(values)) for group, values in zip(groups, of_groups, strict=True)]


def prune_groups(groups: Sequence[RolloutGroup], algorithm: AlgorithmSettings, key: str) -> list[RolloutGroup]:
    """The groups with the weight of every rollout in the loss (CPPO); ``key`` names the random numbers, if any.

    Where advantages differ by token, a rollout counts with the mean of their absolute values.
    """
    if not algorithm.prune_rate:
        return list(groups)
    kept = prune(
        [
            [float(values.abs().mean()) for values in group.token_advantages]
            if group.token_advantages
            else group.advantages
            for group in groups
        ],
        algorithm.prune_rate,
        algorithm.prune_scope,
        algorithm.prune_metric,
        algorithm.prune_correction,
        [f"{key}/{group.sample.sample_id}" for group in groups],
    )
    return [replace(group, kept=tuple(weights)) for group, weights in zip(groups, kept, strict=True)]


def without_truncated(group: RolloutGroup) -> RolloutGroup:
    """The group without responses that were cut off: they were part of the statistics, and do not train."""
    return group.only([index for index, rollout in enumerate(group.rollouts) if rollout.finish_reason != "length"])


def trains(group: RolloutGroup) -> bool:
    """Whether any of the group's rollouts has a part in the loss."""
    return bool(group.rollouts) and any(group.kept or (1.0,))


def kept_tokens(group: RolloutGroup) -> int:
    """Tokens of the prompt and of every response that trains; 0 where none does."""
    weights = group.kept or (1.0,) * len(group.rollouts)
    responses = sum(len(rollout.token_ids) for rollout, weight in zip(group.rollouts, weights, strict=True) if weight)
    return group.prompt.num_tokens + responses if responses else 0


def all_tokens(group: RolloutGroup) -> int:
    """Tokens of the prompt and of all responses."""
    return group.prompt.num_tokens + sum(len(rollout.token_ids) for rollout in group.rollouts)

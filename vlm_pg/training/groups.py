"""Rewards, advantages and pruning of a step's groups, and their metrics over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from vlm_pg.algorithms.advantages import (
    GroupRewards,
    kl_returns,
    length_bonus,
    mean_and_std,
    moments,
    overlong_penalty,
    temporal_bonus,
    token_rounding,
    whitened,
)
from vlm_pg.algorithms.own import load_estimator
from vlm_pg.algorithms.pruning import prune
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.distributed import RankLayout, gather_objects, max_over_ranks, sum_over_ranks
from vlm_pg.metrics import LENGTH_CHART, REWARD_CHART, SPREAD_CHART, Chart, Metric
from vlm_pg.rewards.parts import Response
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.tally import Tally
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import RewardBreakdown, RolloutGroup

# Parts that ``shape_rewards`` and a KL in the reward add; they are in units of the reward.
SHAPED_PARTS = ("temporal", "length_bonus", "overlong", "kl")

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


@dataclass(frozen=True)
class Update:
    """Input of one update, or of all updates of a step.

    Attributes:
        groups: this data rank's share of the complete groups; its sequence ranks have the same.
        vision: the tower's run whose features the prompts of all groups that train carry; None: they are encoded.
        measure_mismatch: add ``mismatch/...``: differences of the recorded log-probabilities from the training
            forward's, over rollouts sampled by the present weights. The same on all ranks.
        may_stop: may be given up between two backward calls, because the step has made no other update yet.
        waiting: context of the collective in which ranks that are done wait for the others.
    """

    groups: Sequence[RolloutGroup]
    learning_rate: float
    vision: StepFeatures | None = None
    measure_mismatch: bool = False
    may_stop: bool = False
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext


def reward_groups(
    groups: Sequence[RolloutGroup], rewarder: Rewarder, should_stop: Callable[[], bool] = lambda: False
) -> list[RolloutGroup]:
    """The groups with the reward of every rollout. Raises InterruptedError if ``should_stop`` says so meanwhile."""
    rewards = iter(rewarder.score(responses_of(groups), should_stop))
    return [replace(group, rewards=tuple(next(rewards) for _ in group.rollouts)) for group in groups]


def responses_of(groups: Sequence[RolloutGroup]) -> list[Response]:
    """All responses, group by group, as rewards take them."""
    return [
        Response(group.sample, rollout.text, len(rollout.token_ids)) for group in groups for rollout in group.rollouts
    ]


def shape_rewards(
    group: RolloutGroup, control: Sequence[float | None] | None, algorithm: AlgorithmSettings, max_new_tokens: int
) -> RolloutGroup:
    """The group with reward parts that depend on several responses or on length.

    Args:
        control: accuracies of responses to the question with shuffled frames; None without any.
    """
    lengths = [len(rollout.token_ids) for rollout in group.rollouts]
    accuracies = [reward.parts.get("accuracy") for reward in group.rewards]
    shaped: dict[str, Sequence[float]] = {}
    right = algorithm.right_above
    if bonus := algorithm.temporal_bonus:
        ratio = algorithm.temporal_ratio
        shaped["temporal"] = temporal_bonus(accuracies, control or (), bonus=bonus, ratio=ratio, right_above=right)
    if bonus := algorithm.length_bonus:
        tokens = algorithm.length_bonus_tokens
        shaped["length_bonus"] = length_bonus(accuracies, lengths, bonus=bonus, tokens=tokens, right_above=right)
    if share := algorithm.overlong_share:
        is_cut = [rollout.finish_reason == "length" for rollout in group.rollouts]
        shaped["overlong"] = [
            overlong_penalty(length, max_new_tokens, share, algorithm.overlong_penalty, cut)
            for length, cut in zip(lengths, is_cut, strict=True)
        ]
    return add_parts(group, shaped)


def add_parts(group: RolloutGroup, parts: Mapping[str, Sequence[float]]) -> RolloutGroup:
    """The group with further reward parts of weight 1; a reward without value stays without."""
    if not parts:
        return group
    rewards = []
    for index, reward in enumerate(group.rewards):
        added = {name: values[index] for name, values in parts.items()}
        total = None if reward.total is None else reward.total + sum(added.values())
        rewards.append(RewardBreakdown(total, {**reward.parts, **added}, reward.notes))
    return replace(group, rewards=tuple(rewards))


def has_spread(group: RolloutGroup) -> bool:
    """Whether at least two rewards differ, a KL in them left out."""
    pairs = [(reward.total, reward.parts.get("kl")) for reward in group.rewards]
    # Subtracting what was added leaves rounding.
    valued = {total if kl is None else round(total - kl, 9) for total, kl in pairs if total is not None}
    return len(valued) > 1


def advantage_groups(
    groups: Sequence[RolloutGroup], algorithm: AlgorithmSettings, part_weights: Mapping[str, float], ranks: RankLayout
) -> list[RolloutGroup]:
    """The groups with the advantage of every rollout. A collective where statistics are over the step.

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
    """The groups with advantages by token, minus the KL from the token to the response's end. A collective.

    With ``scale_advantages=whiten`` these get mean 0 and deviation 1, over all tokens of all ranks. A response whose
    reward has no value is excluded and gets 0.

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
    """The groups with the weight of every rollout in the loss (CPPO); ``key`` seeds random numbers, if any.

    A rollout with advantages by token counts with the mean of their absolute values.
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
    """The group without truncated responses: they count in statistics and do not train."""
    return group.only([index for index, rollout in enumerate(group.rollouts) if rollout.finish_reason != "length"])


def trains(group: RolloutGroup) -> bool:
    """Whether any rollout of the group has a weight in the loss."""
    return any(group.rollout_weights)


def kept_tokens(group: RolloutGroup) -> int:
    """Tokens of the prompt and of every response that trains; 0 if none does."""
    weighted = zip(group.rollouts, group.rollout_weights, strict=True)
    responses = sum(len(rollout.token_ids) for rollout, weight in weighted if weight)
    return group.prompt.num_tokens + responses if responses else 0


def all_tokens(group: RolloutGroup) -> int:
    """Tokens of the prompt and of all responses."""
    return group.prompt.num_tokens + sum(len(rollout.token_ids) for rollout in group.rollouts)


def step_order(orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of every rank's groups from 0 over all ranks, by ``RolloutGroup.order``, then by rank.

    step_order([[0, 3], [2]]) -> [[0, 2], [1]]
    """
    groups = sorted((order, rank, i) for rank, of_rank in enumerate(orders) for i, order in enumerate(of_rank))
    numbers = {group[1:]: number for number, group in enumerate(groups)}
    return [[numbers[rank, i] for i in range(len(of_rank))] for rank, of_rank in enumerate(orders)]


def group_metrics(sampled: Sequence[RolloutGroup], training: Sequence[RolloutGroup]) -> dict[str, float | None]:
    """The step's metrics, None without values. A collective.

    Args:
        sampled: all complete groups of the step on this rank.
        training: those that train, pruned rollouts included.
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
        tally.add(metric, 0, 0)  # exists without groups, too
    tally.add(KEPT_TOKENS, sum(map(kept_tokens, training)))
    found = tally.reduced()
    return {name: found[name] for name in sorted(found, key=_order)}


def _values_by_part(group: RolloutGroup) -> dict[str, list[float]]:
    """Values of the total ("") and of each part ("accuracy"), without None."""
    found: dict[str, list[float]] = {"": []}
    for reward in group.rewards:
        for name, value in {"": reward.total, **reward.parts}.items():
            found.setdefault(name, []).extend([] if value is None else [value])
    return found


def _order(name: str) -> tuple[int, str]:
    """The total first, then the parts of every run, then the others."""
    first = ("reward", "reward/accuracy", "reward/format")
    return (first.index(name), "") if name in first else (3, name) if name.startswith("reward/") else (4, "")


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))

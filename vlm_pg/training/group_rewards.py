"""From rollouts to rewards: every response by itself, then what depends on its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.shaping import length_bonus, overlong_penalty, temporal_bonus
from vlm_pg.rewards.response import Response
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.types import RewardBreakdown, RolloutGroup

# Parts that ``shape_rewards`` and a KL in the reward add; they are in units of the reward.
SHAPED_PARTS = ("temporal", "length_bonus", "overlong", "kl")


def reward_groups(
    groups: Sequence[RolloutGroup], rewarder: Rewarder, should_stop: Callable[[], bool] = lambda: False
) -> list[RolloutGroup]:
    """The groups with the reward of every rollout. Raises InterruptedError if ``should_stop`` says so meanwhile."""
    rewards = iter(rewarder.score(responses_of(groups), should_stop))
    return [replace(group, rewards=tuple(next(rewards) for _ in group.rollouts)) for group in groups]


def responses_of(groups: Sequence[RolloutGroup]) -> list[Response]:
    """All responses, group by group, as rewards look at them."""
    return [
        Response(group.sample, rollout.text, len(rollout.token_ids)) for group in groups for rollout in group.rollouts
    ]


def shape_rewards(
    group: RolloutGroup, control: Sequence[float | None] | None, algorithm: AlgorithmSettings, max_new_tokens: int
) -> RolloutGroup:
    """The group with the parts of the reward that depend on more than one response, or on its length.

    Args:
        control: accuracies of responses to the question with its frames out of order; None where there are none.
    """
    lengths = [len(rollout.token_ids) for rollout in group.rollouts]
    accuracies = [reward.parts.get("accuracy") for reward in group.rewards]
    shaped: dict[str, Sequence[float]] = {}
    if algorithm.temporal_bonus:
        shaped["temporal"] = temporal_bonus(
            accuracies,
            control or (),
            bonus=algorithm.temporal_bonus,
            ratio=algorithm.temporal_ratio,
            right_above=algorithm.right_above,
        )
    if algorithm.length_bonus:
        shaped["length_bonus"] = length_bonus(
            accuracies,
            lengths,
            bonus=algorithm.length_bonus,
            tokens=algorithm.length_bonus_tokens,
            right_above=algorithm.right_above,
        )
    if algorithm.overlong_share:
        shaped["overlong"] = [
            overlong_penalty(
                length,
                max_new_tokens,
                algorithm.overlong_share,
                algorithm.overlong_penalty,
                rollout.finish_reason == "length",
            )
            for length, rollout in zip(lengths, group.rollouts, strict=True)
        ]
    return add_parts(group, shaped)


def add_parts(group: RolloutGroup, parts: Mapping[str, Sequence[float]]) -> RolloutGroup:
    """The group with further parts of the reward, each with weight 1; a reward without value stays without."""
    if not parts:
        return group
    rewards = []
    for index, reward in enumerate(group.rewards):
        added = {name: values[index] for name, values in parts.items()}
        total = None if reward.total is None else reward.total + sum(added.values())
        rewards.append(RewardBreakdown(total, {**reward.parts, **added}, reward.notes))
    return replace(group, rewards=tuple(rewards))


def has_spread(group: RolloutGroup) -> bool:
    """Whether the group says which rollout was better: at least two different rewards, a KL in them left out."""
    valued = (reward for reward in group.rewards if reward.total is not None)
    return len({_without_kl(reward) for reward in valued}) > 1


def _without_kl(reward: RewardBreakdown) -> float:
    assert reward.total is not None
    kl = reward.parts.get("kl")
    # Taking away again what was added leaves rounding.
    return reward.total if kl is None else round(reward.total - kl, 9)

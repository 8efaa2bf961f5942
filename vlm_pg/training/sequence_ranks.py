"""What the sequence ranks of one data rank tell each other before they share its token streams.

Each of them loads, samples and rewards questions of its own, as if it were a data rank. Only the vision tower, whose
frames they divide, scoring and the update, whose streams they divide, need the same questions on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_pg.distributed import SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.rollout.contracts import Sampler, Scorer
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.engines import Engine
from vlm_pg.types import Prompt, ResponseGroup, Rollout


@dataclass(frozen=True)
class SharedPrompts:
    """``everybody``: prompts of all sequence ranks, in their order. ``own``: places of this process's among them."""

    everybody: Sequence[Prompt]
    own: range


def shared_prompts(sequence: SequenceGroup, own: Sequence[Prompt]) -> SharedPrompts:
    """The prompts of all sequence ranks, their pixels included."""
    of_ranks = sequence.gather(list(own))
    first = sum(map(len, of_ranks[: sequence.rank]))
    return SharedPrompts([prompt for of_rank in of_ranks for prompt in of_rank], range(first, first + len(own)))


def sampler_of_all(
    sequence: SequenceGroup, sampler: Sampler, prompts: SharedPrompts, split: Literal["auto", "questions", "prompts"]
) -> RolloutEngine | None:
    """The sampler, if all sequence ranks are to sample every prompt together; the same answer on all of them.

    Raises:
        ConfigError: prompts are to be divided, and cannot be.
    """
    if sequence.size == 1 or split == "questions" or not isinstance(sampler, RolloutEngine):
        return None
    policy, settings = sampler.policy, sampler.settings
    # Where weights are gathered in turns, a rank that waited for another one's prompt would hold up its weights.
    possible = policy.turns is None and policy.settings.share_prefix
    possible &= settings.num_generations >= sequence.size
    if settings.divide_prefix == "always" and not possible:
        raise ConfigError(
            "rollout.divide_prefix is always, but under ZeRO-3 all weights do not fit (rollout.gather), so they are "
            "gathered layer by layer, and processes that take turns cannot sample one prompt together. Set "
            "rollout.divide_prefix=never, or make room for rollout.gather=all."
        )
    if not possible:
        return None
    together = split == "prompts" or settings.divide_prefix == "always" or len(prompts.everybody) < sequence.size
    return sampler if together or sampler.too_long_for_one(prompts.everybody, sequence) else None


def rollouts_together(
    sequence: SequenceGroup, sampler: RolloutEngine, prompts: SharedPrompts, step: int | str
) -> list[tuple[Rollout, ...]]:
    """Rollouts of this process's prompts, which all sequence ranks have sampled together."""
    everywhere = sequence.gather(sampler.generate(prompts.everybody, step, sequence))
    return [tuple(rollout for of_rank in everywhere for rollout in of_rank[place]) for place in prompts.own]


def scores_together(
    engine: Engine,
    scorer: Scorer,
    groups: Sequence[ResponseGroup],
    prompts: Mapping[str, Prompt],
    temperature: float,
) -> list[list[torch.Tensor]]:
    """Log-probabilities of this process's groups, as ``Scorer.score``, from streams that all sequence ranks share.

    Args:
        groups: equally many of each sequence rank or not; none of a rank that has none.
        prompts: by sample id, those of all sequence ranks.
    """
    sequence = engine.sequence
    # Where weights are gathered in turns, no rank may wait for another one.
    if sequence.size == 1 or engine.policy.turns is not None or not isinstance(scorer, PolicyScorer):
        return scorer.score(groups, temperature)
    here = {group.prompt.sample_id: group.prompt for group in groups} | dict(prompts)
    of_ranks = sequence.gather([(group.prompt.sample_id, group.responses) for group in groups])
    everybody = [ResponseGroup(here[name], responses) for of_rank in of_ranks for name, responses in of_rank]
    scored = scorer.score(everybody, temperature, sequence)
    first = sum(map(len, of_ranks[: sequence.rank]))
    return scored[first : first + len(groups)]

"""Micro-batches of groups, by what their prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlm_pg.batching.plan import MicroBatch, plan_micro_batches, tree_tokens
from vlm_pg.models.prompt_tree import shared_tokens
from vlm_pg.types import RolloutGroup


@dataclass(frozen=True)
class Plan:
    """``micro_batches``: every response of every group once. ``in_one_tree``: tokens a single pass would compute."""

    micro_batches: list[MicroBatch]
    in_one_tree: int


def plan_groups(groups: Sequence[RolloutGroup], token_budget: int, share: bool) -> Plan:
    """Groups in micro-batches of at most ``token_budget`` tokens at a time, see ``plan_micro_batches``.

    A response's last token is predicted and never read, so it is no part of a stream.

    Args:
        share: whether prompts that begin alike are computed once.

    Raises:
        ValueError: a prompt with a single response exceeds the budget.
    """
    of_prompts = shared_tokens([group.prompt for group in groups], share=share)

    def shared(i: int, j: int) -> int:
        return of_prompts[i][j]

    prompts = [group.prompt.num_tokens for group in groups]
    responses = [[len(rollout.token_ids) - 1 for rollout in group.rollouts] for group in groups]
    plan = plan_micro_batches(list(zip(prompts, responses, strict=True)), token_budget, shared)
    return Plan(plan, tree_tokens(prompts, range(len(groups)), shared) + sum(map(sum, responses)))

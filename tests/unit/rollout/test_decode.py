"""Rollouts that leave take their keys, values and states with them, and nobody else's; cohorts do not mix."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.cohort import OwnTokens
from vlm_pg.rollout.decoders import DecodeContext
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore
from vlm_pg.rollout.prefill import Prefill
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import Prompt

NUM_TOKENS = BLOCK_TOKENS + 3
VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def prefilled(policy: Policy) -> tuple[WaitingPrompts, PrefixStore, list[Prompt]]:
    """Two questions on one video with one without media between them: paths of two levels and of one."""
    prompts = [make_case(policy, seed=i, **kind).prompt for i, kind in enumerate((VIDEO, {"kind": "text"}, VIDEO))]
    waiting, store = WaitingPrompts(prompts), PrefixStore()
    lengths = {node: item.num_tokens for node, item in enumerate(waiting.nodes)}
    store.rearrange((), lengths)
    Prefill(policy, store, waiting.nodes, prompts, 10_000, lambda: None).run(list(lengths), [])
    return waiting, store, prompts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@torch.no_grad()
def test_those_who_stay_go_on_unchanged(family: str) -> None:
    policy = tiny_policy(family=family)
    waiting, store, prompts = prefilled(policy)
    groups = [0, 0, 1, 1, 2, 2]
    tokens = torch.randint(100, 300, (NUM_TOKENS, len(groups)), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([prompts[group].next_position for group in groups])

    def run(stay: dict[int, list[int]]) -> tuple[list[int], torch.Tensor]:
        """The rollouts left at the end and their last hidden states; ``stay``: who stays, before each token."""
        own = OwnTokens([waiting.paths[group] for group in groups])
        active = torch.arange(len(groups))
        context = DecodeContext(store, [own], policy.kernel)
        for index in range(NUM_TOKENS):
            if index in stay:
                rows = torch.tensor(stay[index])
                own.keep(rows)
                active = active[rows]
                context = DecodeContext(store, [own], policy.kernel)
            hidden = policy.hidden_states(tokens[index, active], (positions[active] + index).expand(3, -1), context)
            own.length += 1
        return active.tolist(), hidden

    _, everyone = run({})
    # Before the first token nobody has anything of their own yet; later a whole group leaves.
    stayed, hidden = run({0: [0, 1, 3, 4, 5], 2: [1, 3, 4], 3: [0, 2]})
    assert stayed == [1, 5]
    assert (hidden - everyone[stayed]).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@torch.no_grad()
def test_rollouts_that_started_at_different_times_share_a_step(family: str) -> None:
    policy = tiny_policy(family=family)
    waiting, store, prompts = prefilled(policy)
    tokens = torch.randint(100, 300, (5, 6), generator=torch.Generator().manual_seed(0))

    def alone(column: int, group: int, count: int) -> torch.Tensor:
        own = OwnTokens([waiting.paths[group]])
        for index in range(count):
            position = torch.full((3, 1), prompts[group].next_position + index)
            context = DecodeContext(store, [own], policy.kernel)
            hidden = policy.hidden_states(tokens[index, column : column + 1], position, context)
            own.length += 1
        return hidden[0]

    # The later cohort reads an earlier node than the first one: rows and nodes are in different orders.
    cohorts = [OwnTokens([waiting.paths[group] for group in groups]) for groups in ((2, 1, 2), (0, 1, 0))]
    of_column = [2, 1, 2, 0, 1, 0]
    for index in range(5):
        running = cohorts if index >= 3 else cohorts[:1]
        columns = list(range(6 if index >= 3 else 3))
        behind = [index if column < 3 else index - 3 for column in columns]
        position = torch.tensor(
            [prompts[of_column[c]].next_position + step for c, step in zip(columns, behind, strict=True)]
        )
        given = torch.stack([tokens[step, c] for c, step in zip(columns, behind, strict=True)])
        context = DecodeContext(store, running, policy.kernel)
        hidden = policy.hidden_states(given, position.expand(3, -1), context)
        for own in running:
            own.length += 1
    for column, count in zip(range(6), (5, 5, 5, 2, 2, 2), strict=True):
        assert (hidden[column] - alone(column, of_column[column], count)).abs().max() < 1e-5

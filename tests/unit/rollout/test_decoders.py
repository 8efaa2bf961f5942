"""Rollouts that leave take their keys, values and states with them, and nobody else's; cohorts do not mix."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from tests.unit.rollout.test_prefill import prefilled
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.cohort import OwnTokens
from vlm_pg.rollout.decoders import DecodeContext
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import Prompt

NUM_TOKENS = BLOCK_TOKENS + 3
VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def stored_prompts(policy: Policy) -> tuple[WaitingPrompts, PrefixStore, list[Prompt]]:
    """Two questions on one video with one without media between them: paths of two levels and of one."""
    prompts = [make_case(policy, seed=i, **kind).prompt for i, kind in enumerate((VIDEO, {"kind": "text"}, VIDEO))]
    return *prefilled(policy, prompts)[:2], prompts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@torch.no_grad()
def test_those_who_stay_go_on_unchanged(family: str) -> None:
    policy = tiny_policy(family=family)
    waiting, store, prompts = stored_prompts(policy)
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
    waiting, store, prompts = stored_prompts(policy)
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


LENGTHS = {4: 3, 7: 5, 9: 2}


def filled() -> tuple[PrefixStore, dict[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    store = PrefixStore()
    store.rearrange((), LENGTHS)
    rows = {node: torch.randn(length, 2, 4, generator=generator) for node, length in LENGTHS.items()}
    for node, k in rows.items():
        # In two parts, the second first.
        for part in (slice(2, None), slice(0, 2)):
            if k[part].shape[0]:
                store.write(0, node, part.start, k[part], -k[part])
        tail = torch.full((1, 3, 6), float(node)).bfloat16()
        store.write_states(1, node, LinearStates(tail, torch.full((1, 2, 4, 4), float(node))))
    return store, rows


def test_nodes_are_read_as_they_were_written() -> None:
    store, rows = filled()
    assert store.num_tokens == 10 and store.order == [4, 7, 9]
    k, v = store.read(0, [(9, 2), (7, 4)])
    assert torch.equal(k, torch.cat([rows[9], rows[7][:4]])) and torch.equal(v, -k)
    states = store.read_states(1, [7, 7, 4])
    assert states.recurrent[:, 0, 0, 0].tolist() == [7, 7, 4]
    assert states.conv_tail.dtype == torch.bfloat16 and states.recurrent.dtype == torch.float32


def test_what_stays_is_moved_and_what_goes_is_forgotten() -> None:
    store, rows = filled()
    store.rearrange({9, 4}, {12: 6})
    assert store.order == [4, 9, 12] and store.num_tokens == 11
    assert store.keys[0].shape[0] == store.values[0].shape[0] == 11
    k, v = store.read(0, [(4, 3), (9, 2)])
    assert torch.equal(k, torch.cat([rows[4], rows[9]])) and torch.equal(v, -k)
    assert sorted(store.states[1]) == [4, 9]
    new = torch.ones(6, 2, 4)
    store.write(0, 12, 0, new, new)
    assert torch.equal(store.read(0, [(12, 6)])[0], new)
    assert torch.equal(store.read(0, [(9, 2)])[0], rows[9])


def test_a_call_names_every_stored_node_in_its_place() -> None:
    store, _ = filled()
    call = store.call({9: 4, 4: 1})
    assert call.query_lengths == (1, 0, 4) and call.key_lengths == (3, 5, 2)
    assert call.query_range == (0, 5) and call.key_range == (0, 10) and not call.causal

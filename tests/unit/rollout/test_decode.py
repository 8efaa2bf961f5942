"""Rollouts that leave the batch take their keys, values and states with them, and nobody else's."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decode import DecodeContext
from vlm_pg.rollout.kv import PrefillContext, PrefixStore

NUM_TOKENS = 5


def prefilled(policy: Policy) -> PrefixStore:
    prompts = [make_case(policy, "text", seed).prompt for seed in range(3)]
    lengths = [prompt.num_tokens for prompt in prompts]
    store, tree = PrefixStore(lengths), PrefixTree(lengths, [-1] * 3)
    ids = torch.cat([prompt.input_ids for prompt in prompts])
    positions = torch.cat([prompt.positions_3P for prompt in prompts], dim=1)
    policy.hidden_states(ids, positions, PrefillContext(store, tree, 0, 0, policy.kernel))
    return store


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@torch.no_grad()
def test_those_who_stay_go_on_unchanged(family: str) -> None:
    policy = tiny_policy(family=family)
    store = prefilled(policy)
    groups = [0, 0, 1, 1, 2, 2]
    tokens = torch.randint(100, 300, (NUM_TOKENS, len(groups)), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([store.prefix_lengths[group] for group in groups])

    def run(stay: dict[int, list[int]]) -> tuple[list[int], torch.Tensor]:
        """The rollouts left at the end and their last hidden states; ``stay``: who stays, before each token."""
        context = DecodeContext(store, groups, policy.kernel)
        active = torch.arange(len(groups))
        for index in range(NUM_TOKENS):
            if index in stay:
                rows = torch.tensor(stay[index])
                context.keep(rows)
                active = active[rows]
            hidden = policy.hidden_states(tokens[index, active], (positions[active] + index).expand(3, -1), context)
            context.num_own += 1
        return active.tolist(), hidden

    _, everyone = run({})
    # Before the first token nobody has anything of their own yet; later a whole group leaves.
    stayed, hidden = run({0: [0, 1, 3, 4, 5], 2: [1, 3, 4], 3: [0, 2]})
    assert stayed == [1, 5]
    assert (hidden - everyone[stayed]).abs().max() < 1e-5


@torch.no_grad()
def test_states_are_stored_once_per_group() -> None:
    policy = tiny_policy(family="qwen3_5")
    store = prefilled(policy)
    assert sorted(store.states) == [0, 1, 2] and sorted(store.keys) == [3]
    assert {len(states.recurrent) for states in store.states.values()} == {3}
    assert store.keys[3].shape[0] == sum(store.prefix_lengths)

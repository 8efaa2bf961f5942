"""However prompts are cut into nodes, pieces and passes, the same keys, values, states and hidden states come out."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from tests.support.groups import Case, make_case, plain_model, positions_4P, tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.prefill import Piece, Prefill, cut_into_passes
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import Prompt

VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def cases(policy: Policy) -> list[Case]:
    """Two questions on a video, one on several images, one without media."""
    kinds = (VIDEO, {"kind": "images"}, VIDEO, {"kind": "text"})
    return [make_case(policy, seed=seed, **kind) for seed, kind in enumerate(kinds)]


def prefilled(
    policy: Policy, prompts: list[Prompt], budget: int = 10_000, layers: AbstractContextManager[None] | None = None
) -> tuple[WaitingPrompts, PrefixStore, list[torch.Tensor]]:
    """The stored prompts, and the hidden state at the end of each."""
    waiting, store = WaitingPrompts(prompts), PrefixStore()
    lengths = {node: item.num_tokens for node, item in enumerate(waiting.nodes)}
    store.rearrange((), lengths)
    prefill = Prefill(policy, store, waiting.nodes, prompts, budget, lambda: None, layers=layers)
    hidden = prefill.run(list(lengths), [path[-1] for path in waiting.paths])
    return waiting, store, [hidden[path[-1]] for path in waiting.paths]


def test_passes_hold_the_budget_and_cover_every_token_once() -> None:
    passes = list(cut_into_passes({3: 5, 4: 12, 8: 2}, 7))
    assert passes == [[Piece(3, 0, 5), Piece(4, 0, 2)], [Piece(4, 2, 9)], [Piece(4, 9, 12), Piece(8, 0, 2)]]
    # The last pass takes along what would be one of few tokens.
    assert list(cut_into_passes({3: 5, 4: 12}, 8, 1)) == [[Piece(3, 0, 5), Piece(4, 0, 3)], [Piece(4, 3, 12)]]
    assert [len(one) for one in cut_into_passes({3: 8, 4: 2}, 8, 1)] == [1, 1]
    assert not list(cut_into_passes({}, 8)) and len(list(cut_into_passes({3: 8}, 8))) == 1


@pytest.mark.parametrize("budget", [10_000, 130, 17])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_any_cut_gives_transformers_hidden_states(family: str, budget: int) -> None:
    policy = tiny_policy(family=family)
    found = cases(policy)
    oracle = plain_model(policy)
    waiting, store, hidden = prefilled(policy, [case.prompt for case in found], budget)
    assert store.num_tokens < sum(case.prompt.num_tokens for case in found), "the video should be stored once"
    for case, own in zip(found, hidden, strict=True):
        inputs = {k: v for k, v in case.inputs.items() if k != "video_metadata"}
        if policy.family.reads_media:
            inputs["position_ids"] = positions_4P(case.prompt)
        expected = oracle(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
        assert (own - expected).abs().max() < 2e-5
    whole = prefilled(policy, [case.prompt for case in found])[1]
    for layer in whole.keys:
        assert (store.keys[layer] - whole.keys[layer]).abs().max() < 5e-5
        assert (store.values[layer] - whole.values[layer]).abs().max() < 5e-5
    for layer, states in whole.states.items():
        ends = [path[-1] for path in waiting.paths]
        cut, uncut = store.read_states(layer, ends), whole.read_states(layer, ends)
        assert torch.allclose(cut.conv_tail, uncut.conv_tail, atol=5e-5)
        assert torch.allclose(cut.recurrent, uncut.recurrent, atol=5e-5)
        assert states


def test_a_stop_is_asked_for_at_every_layer() -> None:
    policy = tiny_policy()
    prompts = [make_case(policy, "text", 0).prompt]
    store, calls = PrefixStore(), []
    store.rearrange((), {0: prompts[0].num_tokens})

    def stop() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise InterruptedError

    prefill = Prefill(policy, store, WaitingPrompts(prompts).nodes, prompts, 10_000, stop)
    with torch.no_grad(), pytest.raises(InterruptedError):
        prefill.run([0], [0])
    assert list(store.keys) == [0]

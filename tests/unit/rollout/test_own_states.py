"""Rows of linear-attention states start from their prompts, go on in place, and move when told to."""

from __future__ import annotations

import pytest
import torch

from tests.unit.rollout.test_linear_step import NUM_TOKENS, PREFIX_LENGTHS, over_tree, random_hidden, tiny_mixer
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import gated_delta_step_, linear_attention_step, linear_attention_step_
from vlm_pg.rollout.ragged import OwnStates

LAYER = 2


def stored(*values: float) -> PrefixStore:
    """Node i: convolution inputs [v, v + 1, v + 2] in each of 4 channels, and a state full of v."""
    store = PrefixStore()
    for node, value in enumerate(values):
        tail = (value + torch.arange(3.0))[None, :, None].expand(1, 3, 4)
        store.write_states(LAYER, node, LinearStates(tail, torch.full((1, 2, 5, 6), value)))
    return store


def first_values(states: OwnStates) -> list[float]:
    return states[LAYER].recurrent[:, 1, 2, 3].tolist()


def test_rows_start_from_the_ends_of_their_prompts_and_move_together() -> None:
    states, store = OwnStates(torch.device("cpu")), stored(10.0, 20.0)
    states.move([], 4)
    states.start([0, 1, 2], [1, 0, 1], store)
    assert first_values(states) == [20.0, 10.0, 20.0, 0.0], "an idle row is finite"
    assert states[LAYER].inputs[:, 3].tolist() == [[20, 21, 22], [10, 11, 12], [20, 21, 22], [0, 0, 0]]
    assert states[LAYER].recurrent.shape == (4, 2, 5, 6) and states[LAYER].recurrent.dtype == torch.float32
    states[LAYER].recurrent[2] = 7.0
    assert store.states[LAYER][1].recurrent.unique().tolist() == [20.0], "rows are copies"
    before = states[LAYER]
    states.move([1, 2], 8)
    states.start([2], [1], store)
    assert first_values(states) == [10.0, 7.0, 20.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert before.recurrent.shape[0] == 4, "the old ones are whoever's still reads them"
    states.move([], 0)
    assert states[LAYER].inputs.shape == (0, 4, 3)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_rows_in_place_step_as_rollouts_do(family: str) -> None:
    """Against the whole tree and against transformers' recurrent rule; an idle row does not disturb, nor explode."""
    mixer = tiny_mixer(family)
    prefixes, own = random_hidden(mixer)
    expected, ends = over_tree(mixer, prefixes, own)
    of_rollout = [group for group in range(len(PREFIX_LENGTHS)) for _ in range(2)]
    copies = LinearStates(ends.conv_tail[of_rollout], ends.recurrent[of_rollout])
    store, states = PrefixStore(), OwnStates(torch.device("cpu"))
    for node in range(len(PREFIX_LENGTHS)):
        store.write_states(LAYER, node, LinearStates(ends.conv_tail[node, None], ends.recurrent[node, None]))
    states.move([], 10)
    states.start(range(8), of_rollout, store)
    states[LAYER].recurrent[8], states[LAYER].inputs[8] = 1e30, -1e30
    addresses = [part.data_ptr() for part in (states[LAYER].inputs, states[LAYER].recurrent)]
    for token in range(NUM_TOKENS):
        hidden = torch.cat([own[:, token], torch.full((2, own.shape[2]), 1e4)])
        out = linear_attention_step_(mixer, hidden, states[LAYER], gated_delta_step_)
        assert (out[:8] - expected[:, token]).abs().max() < 1e-5 * expected.abs().max()
        from_copies, copies = linear_attention_step(mixer, own[:, token], copies)
        assert (out[:8] - from_copies).abs().max() < 1e-6 * expected.abs().max()
        assert (states[LAYER].recurrent[:8] - copies.recurrent).abs().max() < 1e-6 * copies.recurrent.abs().max()
        assert torch.equal(states[LAYER].inputs[:8].transpose(1, 2), copies.conv_tail)
    assert [part.data_ptr() for part in (states[LAYER].inputs, states[LAYER].recurrent)] == addresses
    for _ in range(500):
        out = linear_attention_step_(mixer, hidden, states[LAYER], gated_delta_step_)
    assert bool(out.isfinite().all()) and bool(states[LAYER].recurrent.isfinite().all())

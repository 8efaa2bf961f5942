"""The store holds every prefix once, however the prefixes were cut into parts."""

from __future__ import annotations

import torch

from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.kv import PrefixStore

LENGTHS = (3, 5, 2)


def random_layer() -> tuple[torch.Tensor, torch.Tensor, LinearStates]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(sum(LENGTHS), 2, 4, generator=generator) for _ in range(2))
    tail = torch.randn(len(LENGTHS), 3, 6, generator=generator).bfloat16()
    return k, v, LinearStates(tail, torch.randn(len(LENGTHS), 2, 4, 4, generator=generator))


def test_parts_add_up_to_the_whole() -> None:
    k, v, states = random_layer()
    whole, parts = PrefixStore(LENGTHS), PrefixStore(LENGTHS)
    whole.write(0, 0, k, v)
    whole.write_states(1, 0, states)
    for groups, tokens in ((slice(0, 1), slice(0, 3)), (slice(1, 3), slice(3, 10))):
        parts.write(0, tokens.start, k[tokens], v[tokens])
        parts.write_states(1, groups.start, LinearStates(states.conv_tail[groups], states.recurrent[groups]))
    for store in (whole, parts):
        assert torch.equal(store.keys[0], k) and torch.equal(store.values[0], v)
        assert torch.equal(store.states[1].conv_tail, states.conv_tail)
        assert torch.equal(store.states[1].recurrent, states.recurrent)
        assert store.states[1].conv_tail.dtype == torch.bfloat16
        assert store.states[1].recurrent.dtype == torch.float32

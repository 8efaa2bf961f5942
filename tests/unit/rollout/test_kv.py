"""The store holds every node once and keeps what is still needed when nodes come and go."""

from __future__ import annotations

import torch

from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.kv import PrefixStore

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

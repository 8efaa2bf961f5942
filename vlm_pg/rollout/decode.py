"""Decoding: one token at a time for all rollouts of a batch, behind prefixes that are stored once per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.merge import merge_
from vlm_pg.attention.segments import SegmentCall
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import linear_attention_step

BLOCK_TOKENS = 64


class DecodeContext:
    """One new token for each active rollout: its own tokens and its group's prefix, merged.

    In linear-attention layers a rollout starts from its group's state and has a state of its own from then on.
    All rollouts of a batch started together, so at any time all hold ``num_own`` tokens of their own: no padding.

    Args:
        store: the prefixes.
        groups: group index of each rollout, ascending.
    """

    def __init__(self, store: PrefixStore, groups: Sequence[int], kernel: Kernel):
        self._store = store
        self._kernel = kernel
        self._groups = list(groups)
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, LinearStates] = {}
        self._prefix_calls: dict[int, SegmentCall] = {}
        self.num_own = 0

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rollouts only (int64 [kept], ascending)."""
        self._groups = [self._groups[i] for i in rows.tolist()]
        self._prefix_calls.clear()
        self._own = {layer: (k[rows], v[rows]) for layer, (k, v) in self._own.items()}
        self._states = {layer: _rows(states, rows) for layer, states in self._states.items()}

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [rollouts, N, H], k, v [rollouts, K, H] of the new tokens -> [rollouts, N, H]."""
        own_k, own_v = self._append(layer_index, k, v)
        own_out, own_lse = self._kernel.dense_forward(q[:, None], own_k, own_v, scale)
        repeats = q.shape[1] // k.shape[1]
        # Query heads of one key-value head become extra query rows, so that the prefix is read once for all of them.
        folded = q.unflatten(1, (k.shape[1], repeats)).transpose(1, 2).flatten(0, 1)
        out, lse = self._kernel.segments_forward(
            folded,
            self._store.keys[layer_index],
            self._store.values[layer_index],
            self._prefix_call(repeats),
            scale,
        )
        out = out.unflatten(0, (-1, repeats)).transpose(1, 2).flatten(1, 2)
        lse = lse.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
        merged, merged_lse = out.to(lse.dtype), lse.contiguous()
        merge_(merged, merged_lse, own_out[:, 0], own_lse[:, :, 0].transpose(0, 1))
        return merged.to(q.dtype)

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rollouts, D] of the new tokens -> [rollouts, D]."""
        states = self._states.get(layer_index)
        if states is None:
            states = _rows(self._store.states[layer_index], torch.tensor(self._groups, device=hidden.device))
        out, self._states[layer_index] = linear_attention_step(mixer, hidden, states)
        return out

    def _append(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This token's keys and values behind the earlier ones; room grows in blocks, not to the longest length."""
        own: Any = self._own.get(layer_index)
        if own is None or own[0].shape[1] == self.num_own:
            block = (k.shape[0], BLOCK_TOKENS, *k.shape[1:])
            room = k.new_empty(block), v.new_empty(block)
            own = room if own is None else tuple(torch.cat(pair, dim=1) for pair in zip(own, room, strict=True))
            self._own[layer_index] = own
        end = self.num_own + 1
        own[0][:, self.num_own], own[1][:, self.num_own] = k, v
        return own[0][:, :end], own[1][:, :end]

    def _prefix_call(self, repeats: int) -> SegmentCall:
        if repeats not in self._prefix_calls:
            rows = [0] * len(self._store.prefix_lengths)
            for group in self._groups:
                rows[group] += repeats
            self._prefix_calls[repeats] = SegmentCall(
                (0, sum(rows)), (0, self._store.num_tokens), tuple(rows), self._store.prefix_lengths, causal=False
            )
        return self._prefix_calls[repeats]


def _rows(states: LinearStates, rows: torch.Tensor) -> LinearStates:
    return LinearStates(states.conv_tail[rows], states.recurrent[rows])

"""Decoding: one token at a time for all running rollouts, behind prompts that are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vlm_pg.attention.grouped import merge_
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import linear_attention_step

BLOCK_TOKENS = 64


class OwnTokens:
    """Keys, values and states of the tokens that rollouts have generated themselves.

    Rollouts that were admitted together have equally many, ``length``, at any time: nothing is padded. Room grows in
    blocks, not to the longest length.

    Args:
        paths: for each rollout the stored nodes of its prompt, first to last.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]):
        self.paths = list(paths)
        self.length = 0
        self._keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, LinearStates] = {}

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rollouts only (int64 [kept], ascending)."""
        self.paths = [self.paths[i] for i in rows.tolist()]
        # One layer at a time: no more than one exists twice.
        for layer, (k, v) in self._keys_values.items():
            self._keys_values[layer] = (k[rows], v[rows])
        for layer, states in self._states.items():
            self._states[layer] = LinearStates(states.conv_tail[rows], states.recurrent[rows])

    def append(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This token's keys and values [rollouts, K, H] behind the earlier ones: [rollouts, length + 1, K, H] each."""
        own: Any = self._keys_values.get(layer_index)
        if own is None or own[0].shape[1] == self.length:
            room = k.new_empty(2, k.shape[0], BLOCK_TOKENS, *k.shape[1:]).unbind()
            own = room if own is None else tuple(torch.cat(pair, dim=1) for pair in zip(own, room, strict=True))
            self._keys_values[layer_index] = own
        end = self.length + 1
        own[0][:, self.length], own[1][:, self.length] = k, v
        return own[0][:, :end], own[1][:, :end]

    def states(self, layer_index: int, store: PrefixStore) -> LinearStates:
        """A linear-attention layer's states [rollouts, ...]; a rollout starts from its prompt's."""
        return self._states.get(layer_index) or store.read_states(layer_index, [path[-1] for path in self.paths])

    def set_states(self, layer_index: int, states: LinearStates) -> None:
        self._states[layer_index] = states


class Prompts(Protocol):
    """What new tokens attend to of their prompts."""

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """q [rows, N, H] over the prompts, merged in place into [rows, N, H] and [N, rows] over the rows' own keys."""
        ...


class PromptPart:
    """What new tokens attend to of their prompts: one variable-length call for each level of the tree.

    Args:
        paths: for each row of the stream the stored nodes of its prompt, first to last; none for an idle row.
    """

    def __init__(self, store: PrefixStore, paths: Sequence[tuple[int, ...]], kernel: Kernel):
        self._store, self._kernel = store, kernel
        self._readers = readers_by_level(store, paths)
        self._rows = len(paths)
        # Of each level, made once for these rows and not once per layer: the call, and the rows that ask, ordered by
        # node (None: all, in order).
        self._levels: dict[int, list[tuple[SegmentCall, torch.Tensor | None]]] = {}

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """q [rows, N, H] over the prompts, merged in place into [rows, N, H] and [N, rows] over the rows' own keys."""
        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        repeats = q.shape[1] // keys.shape[1]
        for call, rows in self._levels_for(repeats):
            # Query heads of one key-value head become extra query rows, so that a node is read once for all of them.
            folded = (q if rows is None else q[rows]).unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
            out, out_lse = self._kernel.segments_forward(folded, keys, values, call, scale)
            out = out.unflatten(0, (-1, repeats)).transpose(1, 2).flatten(1, 2)
            out_lse = out_lse.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
            if rows is None:
                merge_(merged, lse, out, out_lse)
                continue
            some, some_lse = merged[rows], lse[:, rows]
            merge_(some, some_lse, out, out_lse)
            merged[rows], lse[:, rows] = some, some_lse

    def _levels_for(self, repeats: int) -> list[tuple[SegmentCall, torch.Tensor | None]]:
        if repeats not in self._levels:
            self._levels[repeats] = []
            for reading in self._readers:
                rows = [row for of_node in reading.values() for row in of_node]
                call = self._store.call({node: len(of_node) * repeats for node, of_node in reading.items()})
                everyone = rows == list(range(self._rows))
                self._levels[repeats].append((call, None if everyone else torch.tensor(rows)))
        return self._levels[repeats]


def readers_by_level(store: PrefixStore, paths: Sequence[tuple[int, ...]]) -> list[dict[int, list[int]]]:
    """Of each level of the prompt tree the rows that read each of its nodes, nodes in the order in which they lie.

    Levels without readers are left out; where prompts are sharded, some nodes are stored on other ranks only.
    """
    place = {node: index for index, node in enumerate(store.order)}
    levels: list[dict[int, list[int]]] = [{} for _ in range(max((len(path) for path in paths), default=0))]
    for row, path in enumerate(paths):
        for reading, node in zip(levels, path, strict=False):
            if store.lengths[node]:
                reading.setdefault(node, []).append(row)
    return [dict(sorted(reading.items(), key=lambda item: place[item[0]])) for reading in levels if reading]


class DecodeContext:
    """One new token for each rollout: its own tokens, cohort by cohort, and its prompt's nodes, merged.

    Args:
        owns: the rollouts, in the order of the stream.
        prompts: what attends to the prompts; None: they all lie in ``store``.
    """

    def __init__(self, store: PrefixStore, owns: Sequence[OwnTokens], kernel: Kernel, prompts: Prompts | None = None):
        self._store = store
        self._owns = list(owns)
        self._sizes = [len(own.paths) for own in owns]
        self._kernel = kernel
        self._prompts = prompts or PromptPart(store, [path for own in owns for path in own.paths], kernel)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [rollouts, N, H], k, v [rollouts, K, H] of the new tokens -> [rollouts, N, H]."""
        parts = [
            self._kernel.dense_forward(one_q[:, None], *own.append(layer_index, one_k, one_v), scale)
            for own, one_q, one_k, one_v in zip(
                self._owns, q.split(self._sizes), k.split(self._sizes), v.split(self._sizes), strict=True
            )
        ]
        lse = torch.cat([part_lse[:, :, 0] for _, part_lse in parts]).transpose(0, 1).contiguous()
        merged = torch.cat([part[:, 0] for part, _ in parts]).to(lse.dtype)
        self._prompts.merge_into(layer_index, q, merged, lse, scale)
        return merged.to(q.dtype)

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rollouts, D] of the new tokens -> [rollouts, D]."""
        before = [own.states(layer_index, self._store) for own in self._owns]
        tails, recurrent = [states.conv_tail for states in before], [states.recurrent for states in before]
        out, after = linear_attention_step(mixer, hidden, LinearStates(torch.cat(tails), torch.cat(recurrent)))
        parts = zip(after.conv_tail.split(self._sizes), after.recurrent.split(self._sizes), strict=True)
        for own, (tail, state) in zip(self._owns, parts, strict=True):
            # Copies where there are several: a view would keep the states of all alive.
            if len(self._owns) > 1:
                tail, state = tail.clone(), state.clone()
            own.set_states(layer_index, LinearStates(tail, state))
        return out

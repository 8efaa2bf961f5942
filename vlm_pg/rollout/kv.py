"""What generation keeps of the prefixes: keys, values and linear-attention states, once per group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.linear_attention import LinearStates


class PrefixStore:
    """What every layer knows of the prefixes of several groups, one after the other.

    ``keys``, ``values``: per full-attention layer [all prefix tokens, K, H].
    ``states``: per linear-attention layer the states at the end of each prefix, one per group.

    They belong to the weights they were computed with and live for one ``generate`` call only.
    """

    def __init__(self, prefix_lengths: Sequence[int]):
        self.prefix_lengths = tuple(prefix_lengths)
        self.num_tokens = sum(prefix_lengths)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states: dict[int, LinearStates] = {}

    def write(self, layer_index: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values [n, K, H] of the prefix tokens ``start`` onwards."""
        _write(self.keys, layer_index, start, k, self.num_tokens)
        _write(self.values, layer_index, start, v, self.num_tokens)

    def write_states(self, layer_index: int, first_group: int, states: LinearStates) -> None:
        """States of the groups ``first_group`` onwards."""
        count = len(self.prefix_lengths)
        if states.recurrent.shape[0] == count:
            self.states[layer_index] = states
            return
        if layer_index not in self.states:
            self.states[layer_index] = LinearStates(_room(states.conv_tail, count), _room(states.recurrent, count))
        rows = slice(first_group, first_group + states.recurrent.shape[0])
        self.states[layer_index].conv_tail[rows] = states.conv_tail
        self.states[layer_index].recurrent[rows] = states.recurrent


class PrefillContext(TreeContext):
    """First pass over some of the prefixes, whose last rows are read; what decoding needs of every layer is stored.

    Args:
        tree: these prefixes, all of them roots.
        start: tokens of the prefixes before them.
        first_group: number of the prefixes before them.
    """

    def __init__(self, store: PrefixStore, tree: PrefixTree, start: int, first_group: int, kernel: Kernel):
        super().__init__(tree, kernel, tree.reading(["last"] * len(tree.lengths)))
        self._store, self._start, self._first_group = store, start, first_group

    def keep_keys_values(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._store.write(layer_index, self._start, k, v)

    def keep_states(self, layer_index: int, states: LinearStates) -> None:
        self._store.write_states(layer_index, self._first_group, states)


def _write(store: dict[int, torch.Tensor], layer_index: int, start: int, rows: torch.Tensor, total: int) -> None:
    if rows.shape[0] == total:
        store[layer_index] = rows.contiguous()
        return
    if layer_index not in store:
        store[layer_index] = _room(rows, total)
    store[layer_index][start : start + rows.shape[0]] = rows


def _room(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_empty(rows, *like.shape[1:])

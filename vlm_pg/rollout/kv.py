"""Stored prompts: keys, values and linear-attention states, once per shared run of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch

from vlm_pg.attention.tree import SegmentCall
from vlm_pg.models.linear_attention import LinearStates


class PrefixStore:
    """Nodes of a prompt tree, whatever their number of readers, each stored once.

    The keys and values of all nodes lie one after the other in one tensor per layer, so that one variable-length call
    reaches any of them. ``order`` names the nodes as they lie, ``lengths`` their tokens.

    ``keys``, ``values``: per full-attention layer [all tokens, K, H].
    ``states``: per linear-attention layer and node the state behind the node's last stored token (one row).
    ``scales``: per full-attention layer its softmax scale.

    Where processes divide the prompts, ``lengths``, keys and values are those of the tokens stored on this one. They
    belong to the weights they were computed with and live for one ``generate`` call only.

    Args:
        fixed: allocate some more room, so that keys and values keep their addresses until it is too small;
            ``reallocations`` counts how often it was.
    """

    def __init__(self, fixed: bool = False) -> None:
        self.fixed, self.reallocations, self._room = fixed, 0, 0
        self.order: list[int] = []
        self.lengths: dict[int, int] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states: dict[int, dict[int, LinearStates]] = {}
        self.scales: dict[int, float] = {}
        self._starts: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.keys.values(), *self.values.values()))

    def rearrange(self, keep: Collection[int], new: Mapping[int, int]) -> None:
        """Only the nodes ``keep`` stay, in their order; room for ``new`` nodes (with their lengths) follows them.

        One layer is copied at a time: beside the new arrangement no more than one old layer is held.
        """
        stored = [node for node in self.order if node in keep]
        rows = [slice(self._starts[node], self._starts[node] + self.lengths[node]) for node in stored]
        lengths = {node: self.lengths[node] for node in stored} | dict(new)
        total = sum(lengths.values())
        grows = not self.fixed or total > self._room
        if grows:
            self._room = store_room(total) if self.fixed else total
            self.reallocations += 1
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                tensors[layer] = old.new_empty(self._room, *old.shape[1:]) if grows else old
                _copy_rows(old, rows, tensors[layer])
        for states in self.states.values():
            for node in [node for node in states if node not in lengths]:
                del states[node]
        self.order, self.lengths = list(lengths), lengths
        self._starts = dict(zip(self.order, (0, *accumulate(lengths.values())), strict=False))

    def write(self, layer_index: int, node: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values [n, K, H] of a node's tokens ``offset`` onwards."""
        start = self._starts[node] + offset
        for tensors, rows in ((self.keys, k), (self.values, v)):
            if layer_index not in tensors:
                tensors[layer_index] = rows.new_empty(self._room, *rows.shape[1:])
            tensors[layer_index][start : start + rows.shape[0]] = rows

    def read(self, layer_index: int, parts: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first tokens of some nodes, ``(node, tokens)`` each, one after the other."""
        rows = [slice(self._starts[node], self._starts[node] + count) for node, count in parts]
        k, v = (torch.cat([tensors[layer_index][r] for r in rows]) for tensors in (self.keys, self.values))
        return k, v

    def write_states(self, layer_index: int, node: int, states: LinearStates) -> None:
        """The state [1, ...] behind the tokens of a node that have run."""
        self.states.setdefault(layer_index, {})[node] = states

    def read_states(self, layer_index: int, nodes: Sequence[int]) -> LinearStates:
        """States [nodes, ...]; a node may be named several times."""
        of_layer = self.states[layer_index]
        return LinearStates(
            torch.cat([of_layer[node].conv_tail for node in nodes]),
            torch.cat([of_layer[node].recurrent for node in nodes]),
        )

    def call(self, rows: Mapping[int, int]) -> SegmentCall:
        """The call in which ``rows[node]`` queries, in the order of the nodes, attend to each node."""
        queries, lengths = zip(*((rows.get(node, 0), self.lengths[node]) for node in self.order), strict=True)
        return SegmentCall((0, sum(queries)), (0, sum(lengths)), queries, lengths, causal=False)


def store_room(tokens: int) -> int:
    """Tokens to allocate where so many are stored: at most an eighth more, and few different numbers."""
    step = max(256, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


def _copy_rows(old: torch.Tensor, rows: Sequence[slice], new: torch.Tensor) -> None:
    """The rows one after the other; ``new`` may be ``old``, in which they then move to the front."""
    start = 0
    for part in rows:
        stop = start + part.stop - part.start
        if new is not old or start != part.start:
            source = old[part]
            new[start:stop] = source.clone() if new is old and stop > part.start else source
        start = stop


BLOCK_TOKENS = 64

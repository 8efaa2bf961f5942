"""States of linear-attention layers (Qwen3.5) of rollouts that are rows of one batch; see ``ragged``.

R rows, C convolution channels, W convolution width, Hv value heads, dk, dv sizes of a key and of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_pg.rollout.kv import PrefixStore


@dataclass(frozen=True)
class RowStates:
    """What a layer keeps of each row, replaced at every token, in place.

    ``inputs`` [R, C, W - 1]: last inputs of the convolution, oldest first. ``recurrent`` fp32 [R, Hv, dk, dv].
    """

    inputs: torch.Tensor
    recurrent: torch.Tensor


class OwnStates:
    """``RowStates`` of all layers. Fewer rows are a view of the same memory; more move to another address.

    An idle row goes on from whatever it had last: nobody reads it, rows do not mix, and the rule keeps it finite (keys
    have length 1, decay and learning rate lie between 0 and 1, so what was stored never grows).
    """

    def __init__(self, device: torch.device) -> None:
        self.num_rows = 0
        self._device = device
        self._layers: dict[int, RowStates] = {}

    def __getitem__(self, layer_index: int) -> RowStates:
        of_layer = self._layers[layer_index]
        return RowStates(of_layer.inputs[: self.num_rows], of_layer.recurrent[: self.num_rows])

    @property
    def nbytes(self) -> int:
        return sum(layer.inputs.nbytes + layer.recurrent.nbytes for layer in self._layers.values())

    def move(self, kept: Sequence[int], num_rows: int) -> bool:
        """The rows ``kept`` become the first ones of ``num_rows``; one layer is copied at a time.

        Returns whether addresses have changed.
        """
        self.num_rows = num_rows
        if not self._layers:
            return False
        room = max(len(next(iter(self._layers.values())).inputs), num_rows)
        moves = any(len(layer.inputs) < num_rows for layer in self._layers.values())
        if not moves and list(kept) == list(range(len(kept))):
            return False
        rows = self._places(kept)
        for layer, old in self._layers.items():
            self._layers[layer] = RowStates(*(_moved(part, rows, room) for part in (old.inputs, old.recurrent)))
        return moves

    def start(self, rows: Sequence[int], nodes: Sequence[int], store: PrefixStore) -> None:
        """These rows begin behind the last tokens of these nodes, one node a row."""
        readers: dict[int, list[int]] = {}
        for row, node in zip(rows, nodes, strict=True):
            readers.setdefault(node, []).append(row)
        if not store.states:
            return
        # All in one copy, whatever the number of layers and nodes.
        places = self._places([row for reading in readers.values() for row in reading])
        of_nodes = dict(zip(readers, places.split([len(reading) for reading in readers.values()]), strict=True))
        for layer, states in store.states.items():
            for node, at in of_nodes.items():
                inputs, recurrent = states[node].conv_tail.transpose(1, 2), states[node].recurrent
                if layer not in self._layers:
                    self._layers[layer] = RowStates(*(_rows_like(part, self.num_rows) for part in (inputs, recurrent)))
                of_layer = self._layers[layer]
                of_layer.inputs[at], of_layer.recurrent[at] = inputs, recurrent

    def _places(self, rows: Sequence[int]) -> torch.Tensor:
        """Numbers of rows on the device; nobody waits for them to get there."""
        return torch.tensor(rows, dtype=torch.int64).to(self._device, non_blocking=True)


def _rows_like(one: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Zeros for so many rows of which ``one`` [1, ...] could be one."""
    return torch.zeros(num_rows, *one.shape[1:], dtype=one.dtype, device=one.device)


def _moved(old: torch.Tensor, rows: torch.Tensor, room: int) -> torch.Tensor:
    found = old[rows]
    new = old if len(old) == room else _rows_like(old, room)
    new[: len(rows)] = found
    return new

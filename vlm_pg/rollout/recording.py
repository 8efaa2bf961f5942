"""What decode steps compute, recorded for the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.models.network import Network
from vlm_pg.models.recorded import Put
from vlm_pg.types import Kind, RecordedRows

_Cohort = Any  # decoding's, which imports this module


@dataclass
class _TakenSteps:
    """Steps ``start`` to ``stop`` of a cohort among those taken from the ring, [S, R, ...], and its rows in them."""

    steps: Mapping[Kind, torch.Tensor]
    rows: list[int]
    start: int
    stop: int


class StepRing:
    """A ``ForwardRecorder`` of decode steps of R rows each.

    The last ``STEPS`` are the layers' own tensors, or lie in tensors [S, R, ...] that keep their addresses, so that a
    CUDA graph can write them; which step is written is in a tensor as well. When there are ``STEPS``, or rows get other
    numbers, they are copied once.
    """

    STEPS = 64

    def __init__(self, network: Network):
        self._kinds, self._device = network.recorded_kinds(), network.device
        self._last_layer = max(layer for layer, _ in self._kinds)
        self._slot = torch.zeros(1, dtype=torch.int64, device=network.device)
        self._flat: dict[Kind, torch.Tensor] = {}
        self._lists: dict[Kind, list[torch.Tensor]] = {kind: [] for kind in self._kinds}
        self._room = self._num_rows = self._steps = 0
        self._rows: dict[_Cohort, list[int]] = {}
        self._first: dict[_Cohort, int] = {}  # step of the ring
        self._taken: dict[_Cohort, list[_TakenSteps]] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._flat.values())

    def clear(self) -> None:
        """End a call."""
        self._rows, self._first, self._taken = {}, {}, {}

    def lay_out(self, rows: Mapping[_Cohort, Sequence[int]], num_rows: int, in_place: bool = False) -> bool:
        """The rows of each cohort from now on, out of ``num_rows``; whether tensors have another address.

        ``in_place``: steps are written into tensors that keep theirs.
        """
        self._take()
        for cohort, of_cohort in rows.items():
            self.admit(cohort, of_cohort)
        moves = in_place and num_rows > self._room
        self._num_rows = num_rows
        if moves:
            self._room = num_rows
            for kind, (shape, dtype) in self._kinds.items():
                self._flat[kind] = torch.zeros(self.STEPS * num_rows, *shape, dtype=dtype, device=self._device)
        return moves

    def admit(self, cohort: _Cohort, rows: Sequence[int]) -> None:
        self._rows[cohort] = list(rows)
        self._first.setdefault(cohort, self._steps)
        self._taken.setdefault(cohort, [])

    def retain(self, cohort: _Cohort, rows: Sequence[int]) -> None:
        """As ``Decoder.retain``."""
        known = self._rows.pop(cohort, [])
        if known and rows:
            self._rows[cohort] = [known[row] for row in rows]
            for taken in self._taken[cohort]:
                taken.rows = [taken.rows[row] for row in rows]
        elif known:
            del self._first[cohort], self._taken[cohort]

    def recorded_rows(self, cohort: _Cohort, row: int, put: Put) -> list[RecordedRows]:
        """All steps of a rollout, in pieces whose tensors are kept by ``put``, or as they are if that clones them."""
        steps = [
            {kind: x[one.start : one.stop, one.rows[row]] for kind, x in one.steps.items()}
            for one in self._taken[cohort]
        ]
        if self._steps > (first := self._first[cohort]):
            number = self._rows[cohort][row]
            steps.append({kind: self._steps_of(kind, first, number) for kind in self._kinds})
        found = []
        for one in steps:
            found.append(RecordedRows(len(one[0, "input"])))
            for kind, x in one.items():
                found[-1].keep(kind, x, torch.Tensor.detach if put is torch.clone else put)
        return found

    def next_step(self) -> None:
        """Called before each step."""
        if self._steps == self.STEPS:
            self._take()
        self._steps += 1

    def layer_input(self, index: int, hidden: torch.Tensor) -> None:
        """[1, R, D] of a layer; behind the last layer the step ends."""
        self._write((index, "input"), hidden[0])
        if index == self._last_layer:
            self._slot += 1

    def attended(self, layer_index: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention's output [R, N, H] and log-sum-exp [N, R]."""
        self._write((layer_index, "out"), out)
        self._write((layer_index, "lse"), lse.T)

    def routed(self, layer_index: int, experts: torch.Tensor) -> None:
        """A mixture's experts int64 [R, k]."""
        self._write((layer_index, "experts"), experts)

    def _write(self, kind: Kind, values: torch.Tensor) -> None:
        if self._room:
            self._view(kind).index_copy_(0, self._slot, values[None])
        else:
            self._lists[kind].append(values)

    def _steps_of(self, kind: Kind, first: int = 0, row: int | None = None) -> torch.Tensor:
        """Steps [S, R, ...] from ``first`` on, or those of one row [S, ...], copied."""
        if self._room:
            steps = self._view(kind)[first : self._steps]
            return (steps if row is None else steps[:, row]).clone()
        return torch.stack([step if row is None else step[row] for step in self._lists[kind][first:]])

    def _view(self, kind: Kind) -> torch.Tensor:
        return self._flat[kind][: self.STEPS * self._num_rows].unflatten(0, (self.STEPS, self._num_rows))

    def _take(self) -> None:
        if stop := self._steps:
            recorded = {cohort: rows for cohort, rows in self._rows.items() if cohort.records}
            steps = {kind: self._steps_of(kind) for kind in self._kinds} if recorded else {}
            for cohort, rows in recorded.items():
                if stop > self._first[cohort]:
                    self._taken[cohort].append(_TakenSteps(steps, list(rows), self._first[cohort], stop))
            self._slot.zero_()
            self._lists, self._steps = {kind: [] for kind in self._kinds}, 0
        self._first = dict.fromkeys(self._first, 0)

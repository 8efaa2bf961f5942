"""What decode steps compute, recorded for the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vlm_pg.models.policy import Policy
from vlm_pg.models.recorded import RecordedRows, hook_routers

if TYPE_CHECKING:
    from vlm_pg.rollout.decoding import Cohort

# A layer, and what of it: "input" (behind the last layer its output), "out" and "lse" of attention, "experts".
Kind = tuple[int, str]


@dataclass
class _TakenSteps:
    """Steps ``start`` to ``stop`` of a cohort among those taken from the ring, [S, R, ...], and its rows in them."""

    steps: Mapping[Kind, torch.Tensor]
    rows: list[int]
    start: int
    stop: int


class StepRing:
    """A ``ForwardRecorder`` of decode steps of R rows each.

    The last ``STEPS`` lie in tensors [S, R, ...] that keep their addresses, so that a CUDA graph can write them; which
    step is written is in a tensor as well. When they are full, or rows get other numbers, they are copied once.

    Args:
        kinds: shape of a row and dtype.
    """

    STEPS = 64

    def __init__(self, kinds: Mapping[Kind, tuple[tuple[int, ...], torch.dtype]], device: torch.device):
        self._kinds, self._device = kinds, device
        self._last_layer = max(layer for layer, _ in kinds)
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._flat: dict[Kind, torch.Tensor] = {}
        self._room = self._num_rows = self._steps = 0
        self._rows: dict[Cohort, list[int]] = {}
        self._first: dict[Cohort, int] = {}  # step of the ring
        self._taken: dict[Cohort, list[_TakenSteps]] = {}

    @classmethod
    def of(cls, policy: Policy) -> StepRing:
        whole, dtype = policy.model.config, policy.dtype
        text, layers = whole.get_text_config(), policy.family.layer_kinds(whole)
        heads, _, head_dim = policy.family.head_shape(whole)
        kinds: dict[Kind, tuple[tuple[int, ...], torch.dtype]]
        kinds = {(layer, "input"): ((text.hidden_size,), dtype) for layer in range(len(layers) + 1)}
        for layer in (layer for layer, kind in enumerate(layers) if kind == "full_attention"):
            kinds |= {(layer, "out"): ((heads, head_dim), dtype), (layer, "lse"): ((heads,), torch.float32)}
        for layer in hook_routers(policy.language_model):
            kinds[layer, "experts"] = (text.num_experts_per_tok,), torch.int64
        return cls(kinds, policy.device)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._flat.values())

    def clear(self) -> None:
        """End a call."""
        self._rows, self._first, self._taken = {}, {}, {}

    def lay_out(self, rows: Mapping[Cohort, Sequence[int]], num_rows: int) -> bool:
        """The rows of each cohort from now on, out of ``num_rows``; whether tensors have another address."""
        self._take()
        for cohort, of_cohort in rows.items():
            self.admit(cohort, of_cohort)
        moves, self._num_rows = num_rows > self._room, num_rows
        if moves:
            self._room = num_rows
            for kind, (shape, dtype) in self._kinds.items():
                self._flat[kind] = torch.zeros(self.STEPS * num_rows, *shape, dtype=dtype, device=self._device)
        return moves

    def admit(self, cohort: Cohort, rows: Sequence[int]) -> None:
        self._rows[cohort] = list(rows)
        self._first.setdefault(cohort, self._steps)
        self._taken.setdefault(cohort, [])

    def retain(self, cohort: Cohort, rows: Sequence[int]) -> None:
        """As ``Decoder.retain``."""
        known = self._rows.pop(cohort, [])
        if known and rows:
            self._rows[cohort] = [known[row] for row in rows]
            for taken in self._taken[cohort]:
                taken.rows = [taken.rows[row] for row in rows]
        elif known:
            del self._first[cohort], self._taken[cohort]

    def recorded_rows(self, cohort: Cohort, row: int) -> list[RecordedRows]:
        """All steps of a rollout, in pieces."""
        found = [
            RecordedRows.of_steps({kind: x[one.start : one.stop, one.rows[row]] for kind, x in one.steps.items()})
            for one in self._taken[cohort]
        ]
        if self._steps > (first := self._first[cohort]):
            number = self._rows[cohort][row]
            now = {kind: self._view(kind)[first : self._steps, number].clone() for kind in self._kinds}
            found.append(RecordedRows.of_steps(now))
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
        self._view(kind).index_copy_(0, self._slot, values[None])

    def _view(self, kind: Kind) -> torch.Tensor:
        return self._flat[kind][: self.STEPS * self._num_rows].unflatten(0, (self.STEPS, self._num_rows))

    def _take(self) -> None:
        stop, self._steps = self._steps, 0
        if stop:
            self._slot.zero_()
            recorded = {cohort: rows for cohort, rows in self._rows.items() if cohort.records}
            steps = {kind: self._view(kind)[:stop].clone() for kind in self._kinds} if recorded else {}
            for cohort, rows in recorded.items():
                if stop > self._first[cohort]:
                    self._taken[cohort].append(_TakenSteps(steps, list(rows), self._first[cohort], stop))
        self._first = dict.fromkeys(self._first, 0)

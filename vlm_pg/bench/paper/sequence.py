"""One of several sequence ranks, alone in its process: what it would send is counted, and nothing is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch

from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.operations import spanned_bytes
from vlm_pg.distributed import SequenceGroup
from vlm_pg.distributed.sequence_group import ALL_GATHER, ALL_TO_ALL

T = TypeVar("T")


class CountedRank(SequenceGroup):
    """Rank ``rank`` of ``size``, which gets tensors of the shapes that the others would send, without values.

    NCCL makes one kernel of a collective, which reads what this rank gives and writes what it gets, its own part too.

    ``launches``, ``moved``: collectives, and bytes that their kernels read and write here, by collective.
    """

    def __init__(self, size: int, rank: int):
        super().__init__(size, rank)
        self.launches: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def gather(self, value: T) -> list[T]:
        """All say the same: what they are asked is the same."""
        return [value] * self.size

    def add_to(self, counts: Counts) -> None:
        """Collectives among what was counted while this rank worked."""
        counts.sent.update(self.sent)
        counts.launches.update(self.launches)
        counts.bytes.update({("copy", name): moved for name, moved in self.moved.items()})

    def _exchange_rows(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        given = values.contiguous()
        came = values.new_empty((sum(receive), *values.shape[1:]))
        self._note(ALL_TO_ALL, given, came)
        return came

    def _gather_into(self, everything: torch.Tensor, own: torch.Tensor) -> None:
        self._note(ALL_GATHER, own, everything)

    def _note(self, collective: str, given: torch.Tensor, came: torch.Tensor) -> None:
        self.launches[collective] += 1
        self.moved[collective] += spanned_bytes(given) + spanned_bytes(came)

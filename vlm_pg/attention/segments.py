"""One variable-length attention call: which query rows meet which key rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

# Scattered segments with at most this many keys are gathered into one dense call; longer ones are not worth the copy.
GATHER_UP_TO = 256


@dataclass(frozen=True)
class SegmentCall:
    """Segment i of the queries attends to segment i of the keys, and to nothing else.

    ``query_range`` and ``key_range``: first and past-the-last token in the stream; the segments fill them in order.
    ``query_lengths``, ``key_lengths``: tokens of each segment; a segment without queries is allowed.
    ``causal``: aligned at the top left (only used where both lengths are equal).
    ``at_most``: upper bounds of query and key lengths, passed to the kernel instead of the maxima, for a call in a CUDA
    graph whose replays have other lengths, see ``fixed_on``.

    Two groups (prefixes of 3 and 2 tokens, responses of 2+2 and 4), responses attending to their prefixes:

        SegmentCall((5, 13), (0, 5), (4, 4), (3, 2), causal=False)
    """

    query_range: tuple[int, int]
    key_range: tuple[int, int]
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    _on_device: dict = field(default_factory=dict, compare=False, repr=False)
    at_most: tuple[int, int] | None = None

    @property
    def query_rows(self) -> slice:
        return slice(*self.query_range)

    @property
    def key_rows(self) -> slice:
        return slice(*self.key_range)

    @property
    def max_query_length(self) -> int:
        return self.at_most[0] if self.at_most else max(self.query_lengths)

    @property
    def max_key_length(self) -> int:
        return self.at_most[1] if self.at_most else max(self.key_lengths)

    def fixed_on(self, cu_q: torch.Tensor, cu_k: torch.Tensor) -> SegmentCall:
        """The same, with cumulative lengths in tensors that the caller owns; they may end in segments without rows."""
        self._on_device[cu_q.device] = (cu_q, cu_k)
        return self

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative lengths int32 [segments + 1] of queries and keys; made once per device, not once per layer."""
        if device not in self._on_device:
            # Copied without waiting for what the device is doing; the first layer of a pass asks for them.
            self._on_device[device] = tuple(
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
                for lengths in (self.query_lengths, self.key_lengths)
            )
        return self._on_device[device]

    def same_shape_batches(self) -> list[SegmentBatch]:
        """Segments with queries, gathered by (query length, key length): what a dense kernel can take in one call."""
        if "batches" not in self._on_device:
            query_starts = (0, *accumulate(self.query_lengths))
            key_starts = (0, *accumulate(self.key_lengths))
            by_shape: dict[tuple[int, int], list[int]] = {}
            for index, shape in enumerate(zip(self.query_lengths, self.key_lengths, strict=True)):
                if shape[0]:
                    by_shape.setdefault(shape, []).append(index)
            self._on_device["batches"] = [
                SegmentBatch.make(q_len, k_len, [query_starts[i] for i in run], [key_starts[i] for i in run])
                for (q_len, k_len), rows in by_shape.items()
                for run in (_consecutive_runs(rows) if k_len > GATHER_UP_TO else [rows])
            ]
        return self._on_device["batches"]


def _consecutive_runs(rows: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of one shape. ``query_index`` and ``key_index`` are a slice (no copy) where rows are consecutive."""

    count: int
    query_length: int
    key_length: int
    query_index: slice | torch.Tensor
    key_index: slice | torch.Tensor

    @classmethod
    def make(cls, query_length: int, key_length: int, query_starts: list[int], key_starts: list[int]) -> SegmentBatch:
        return cls(
            len(query_starts),
            query_length,
            key_length,
            _row_index(query_starts, query_length),
            _row_index(key_starts, key_length),
        )


def _row_index(starts: list[int], length: int) -> slice | torch.Tensor:
    if all(b - a == length for a, b in pairwise(starts)):
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()

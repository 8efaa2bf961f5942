"""The largest differencing method (Karmarkar and Karp, 1982) for parts of equally many items."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(order=True)
class _Part:
    """Items that go together; ordered by their sum, then their number, then the items themselves."""

    total: int
    count: int
    items: list[tuple[int, int]]

    def with_all(self, other: _Part) -> _Part:
        return _Part(self.total + other.total, self.count + other.count, self.items + other.items)


def equal_counts(values: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``values`` in ``parts`` lists of equal length whose sums are close.

    Rows of ``parts`` items of similar size are formed; the two rows of the largest differences are laid over each
    other, the large items of one on the small ones of the other, until one row of sums is left.

    Raises:
        ValueError: the number of values is no multiple of ``parts``.
    """
    if not values or len(values) % parts:
        raise ValueError(f"{len(values)} items cannot make {parts} parts of equally many. Pass a multiple of {parts}.")
    ascending = sorted((value, index) for index, value in enumerate(values))
    rows = []
    for start in range(0, len(values), parts):
        row = [_Part(value, 1, [(index, value)]) for value, index in ascending[start : start + parts]]
        rows.append(_entry(row))
    heapq.heapify(rows)
    while len(rows) > 1:
        one, other = heapq.heappop(rows)[-1], heapq.heappop(rows)[-1]
        heapq.heappush(rows, _entry([large.with_all(small) for large, small in zip(one, reversed(other), strict=True)]))
    return [sorted(index for index, _ in part.items) for part in rows[0][-1]]


def _entry(row: list[_Part]) -> tuple[int, tuple[int, int], list[tuple[int, int]], list[_Part]]:
    """For a heap that gives the largest difference first, and among equal ones the largest part."""
    descending = sorted(row, reverse=True)
    largest = descending[0]
    negative = [(-index, -value) for index, value in largest.items]
    return descending[-1].total - largest.total, (-largest.total, -largest.count), negative, descending

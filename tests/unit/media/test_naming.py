"""Which frame is which, on sequences of timestamps as they come out of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.seeking import MOST_HELD, keep_by_order, keep_by_time


def named(keep_by: Callable, come: list[int], pts: list[int], wanted: list[int], start: int = 0) -> tuple:
    """Whether all wanted are there, and of each place kept the how-manieth frame it is; and how many were decoded."""
    frames = [SimpleNamespace(pts=time, time=float(time), nth=nth) for nth, time in enumerate(come)]
    kept: dict[int, int] = {}
    left = iter(frames)
    is_there = keep_by(left, pts, start, wanted, lambda place, frame: kept.update({place: frame.nth}))
    return is_there, kept, len(come) - len(list(left))


TEN = list(range(10))


@pytest.mark.parametrize(
    ("come", "pts", "wanted", "expected"),
    [
        (TEN, TEN, [0, 4], (True, {0: 0, 4: 4}, 5)),  # nothing is decoded behind the last one
        ([0, 1, 3, 4], [0, 1, 2, 3, 4], [1, 2], (False, {1: 1}, 3)),  # 2 is left out, and 3 is not put in its place
        ([0, 1, 3, *range(4, 90)], list(range(90)), [3], (True, {3: 2}, 4 + MOST_HELD - 1)),  # 2 is left out
        ([0, 1], TEN, [1, 2], (False, {1: 1}, 2)),
        ([0, 7, 7, 9], [0, 7, 7, 9], [3], (True, {3: 3}, 4)),  # equal times on the way
    ],
)
def test_by_time(come: list[int], pts: list[int], wanted: list[int], expected: tuple) -> None:
    assert named(keep_by_time, come, pts, wanted) == expected


@pytest.mark.parametrize(
    ("come", "wanted"),
    [
        ([0, 3, 2, 4, 1], [4]),  # seen on the way
        ([0, 3, 2, 4, 1], [3]),  # seen behind: 1 and 2 had not come
        ([0, 2, 3, 1, 4], [2]),
        ([0, 2, 0, 4], [2]),  # two of one time, of which one had not come
    ],
)
def test_times_that_are_not_those_of_presentation(come: list[int], wanted: list[int]) -> None:
    with pytest.raises(DecodeFailure, match="in another order than their times"):
        named(keep_by_time, come, sorted(come), wanted)


@pytest.mark.parametrize(
    ("come", "pts", "first", "wanted", "expected"),
    [
        # 0 P1 B2 b3 b4 | P5 b6 b7: stored in the order of their times
        ([0, 3, 2, 4, 1, 6, 7, 5], list(range(8)), 0, [1], (True, {1: 1}, 5)),
        ([0, 3, 2, 4, 1, 6, 7, 5], list(range(8)), 0, [4, 5], (True, {4: 4, 5: 5}, 8)),
        ([0, 40, 80, 80, 120], [0, 40, 80, 80, 120], 0, [2, 3], (True, {2: 2, 3: 3}, 5)),  # two of one time
        ([0, 40, 80, 80], [0, 40, 80, 80], 0, [3], (True, {3: 3}, 4)),
        ([5, 6, 7], list(range(8)), 5, [5], (True, {5: 0}, 2)),  # from place 5 on
        # two pictures stored behind the first one and shown before it are left out: places are off by two
        ([5, 8, 9, 10, 11], list(range(20)), 5, [5], (False, {5: 0}, 5)),
        ([0, 40, 80, 120], [0, 40, 80, 80, 120], 0, [2], (False, {2: 2}, 4)),  # one of two: which?
        ([0, *range(2, 90)], list(range(90)), 0, [1], (False, {1: 1}, MOST_HELD + 3)),  # it is not sought for ever
        ([0, 1, 2], [0, 1], 0, [1], (True, {1: 1}, 2)),
        ([0, 5, 6], [0, 1], 0, [1], (False, {1: 1}, 3)),
    ],
)
def test_by_order(come: list[int], pts: list[int], first: int, wanted: list[int], expected: tuple) -> None:
    assert named(keep_by_order, come, pts, wanted, first) == expected

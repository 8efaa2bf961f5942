"""Pieces of a tower's input: every frame once, in order, none cut, none larger than asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.models.tower_inputs import VisionPiece, pieces, shares

GRIDS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)), max_size=5)


def frames_of(grids: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(h, w) for t, h, w in grids for _ in range(t)]


def covered(found: list[VisionPiece], grids: list[tuple[int, int, int]]) -> bool:
    """No gap, no overlap, every piece's patches are those of its grids, and the frames are the media's own."""
    places = [0, *(piece.stop for piece in found)]
    assert [piece.start for piece in found] == places[:-1]
    assert all(piece.patches == sum(t * h * w for t, h, w in piece.grids) for piece in found)
    return frames_of([grid for piece in found for grid in piece.grids]) == frames_of(grids)


def test_hand_checked() -> None:
    # 5 frames of 4 patches, then an image of 6: at most 8 patches a piece.
    assert pieces([(5, 2, 2), (1, 2, 3)], 8) == [
        VisionPiece(((2, 2, 2),), 0, 8),
        VisionPiece(((2, 2, 2),), 8, 16),
        VisionPiece(((1, 2, 2),), 16, 20),
        VisionPiece(((1, 2, 3),), 20, 26),
    ]
    assert pieces([(5, 2, 2), (1, 2, 3)], 10)[-1] == VisionPiece(((1, 2, 2), (1, 2, 3)), 16, 26)
    assert pieces([(1, 4, 4), (2, 1, 2)], 1) == [
        VisionPiece(((1, 4, 4),), 0, 16),
        VisionPiece(((1, 1, 2),), 16, 18),
        VisionPiece(((1, 1, 2),), 18, 20),
    ]
    assert pieces([], 8) == []


@given(GRIDS, st.integers(1, 60))
def test_every_frame_once_and_no_piece_too_large(grids: list[tuple[int, int, int]], most: int) -> None:
    found = pieces(grids, most)
    assert covered(found, grids)
    for piece in found:
        assert piece.patches <= most or frames_of(list(piece.grids)) == [piece.grids[0][1:]]


@given(GRIDS, st.integers(1, 6))
def test_shares_are_as_many_as_asked_for_and_even(grids: list[tuple[int, int, int]], parts: int) -> None:
    found = shares(grids, parts)
    assert len(found) == parts
    assert covered(found, grids)
    largest = max(piece.patches for piece in found)
    # No cut into so many pieces has a smaller largest one.
    if largest > 1:
        smaller = pieces(grids, largest - 1)
        assert len(smaller) > parts or max(piece.patches for piece in smaller) >= largest


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="most_patches is 0; it must be at least 1"):
        pieces([(1, 2, 2)], 0)
    with pytest.raises(ValueError, match="parts is 0; it must be at least 1"):
        shares([(1, 2, 2)], 0)

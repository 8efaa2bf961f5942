"""Frames of a video within a budget of visual tokens: a table by hand, and what holds of any numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.errors import SampleError
from vlm_pg.media.sampling import frames_within, resized_size, video_max_pixels, visual_tokens

AREA = 28 * 28
HD = (1080, 1920)


@pytest.mark.parametrize(
    ("count", "least", "stored", "budget", "expected"),
    [
        # 128 patches: 8 x 15 = 120 a frame (16:9), 8 pairs
        (16, 4, HD, None, (16, 224, 420)),
        (16, 4, HD, 960, (16, 224, 420)),
        # one token less: 119 patches a frame, 8 x 14
        (16, 4, HD, 959, (16, 224, 392)),
        # 100 / 8 = 12 patches a frame: 2 x 4
        (16, 4, HD, 100, (16, 56, 112)),
        # 40 / 8 = 5 patches: 1 x 2, of at least 4 asked for, rounded down as qwen-vl-utils does at its least area
        (16, 4, HD, 40, (16, 28, 56)),
        # below: at 4 patches a frame 1 x 2 still fits 8 pairs into 16
        (16, 4, HD, 16, (16, 28, 56)),
        # 15: seven pairs of 1 x 2
        (16, 4, HD, 15, (14, 28, 56)),
        (16, 4, HD, 4, (4, 28, 56)),
        # moments: none can be taken away
        (16, 16, HD, 16, (16, 28, 56)),
        # small frames are scaled up to 4 patches, and cannot become smaller
        (8, 2, (28, 28), 16, (8, 56, 56)),
        (8, 2, (28, 28), 15, (6, 56, 56)),
        # 1:2 at 8 patches is 2 x 4, at 7 of them 1 x 3, at 4 of them 1 x 2
        (4, 2, (400, 800), 16, (4, 56, 112)),
        (4, 2, (400, 800), 15, (4, 28, 84)),
        (4, 2, (400, 800), 9, (4, 28, 56)),
    ],
)
def test_by_hand(
    count: int, least: int, stored: tuple[int, int], budget: int | None, expected: tuple[int, int, int]
) -> None:
    assert frames_within(count, least, stored, (4 * AREA, 128 * AREA), 28, budget) == expected


def test_no_way_to_keep_the_budget() -> None:
    words = r"16 frames of 1920x1080 pixels, .* take more than 15 visual tokens, even scaled to 3136 pixels .* Raise it"
    with pytest.raises(SampleError, match=words) as got:
        frames_within(16, 16, HD, (4 * AREA, 128 * AREA), 28, 15)
    assert got.value.reason == "too_many_visual_tokens"
    with pytest.raises(SampleError, match="4 frames of 1920x1080") as got:
        frames_within(16, 4, HD, (64 * AREA, 128 * AREA), 28, 60)
    assert got.value.reason == "too_many_visual_tokens"
    with pytest.raises(SampleError) as got:
        frames_within(16, 4, (31, 639), (4 * AREA, 20 * AREA), 28, 1000)
    assert got.value.reason == "too_narrow"


def test_a_frame_that_would_become_too_narrow_costs_frames_instead() -> None:
    """1:8 at 4 patches has a side of 0; at 8 patches it has 1 x 8."""
    assert frames_within(8, 2, (240, 1920), (4 * AREA, 128 * AREA), 28, 16) == (4, 28, 224)


@given(
    count=st.integers(1, 400).map(lambda pairs: 2 * pairs),
    least=st.integers(1, 8).map(lambda pairs: 2 * pairs),
    height=st.integers(20, 2200),
    width=st.integers(20, 4000),
    low=st.integers(1, 64),
    more=st.integers(0, 900),
    budget=st.integers(1, 60_000),
    factor=st.sampled_from([28, 32]),
)
def test_the_budget_holds_and_nothing_is_given_away_for_nothing(
    count: int, least: int, height: int, width: int, low: int, more: int, budget: int, factor: int
) -> None:
    """What comes is within the budget; frames go only where the least area does not fit; area only where it must."""
    bounds, least = (low * factor**2, (low + more) * factor**2), min(least, count)
    free = outcome(count, least, (height, width), bounds, factor)
    if isinstance(free, str):
        assert free in ("too_narrow", "bad_aspect_ratio")
        return
    within = outcome(count, least, (height, width), bounds, factor, budget)
    if isinstance(within, str):
        assert within == "too_many_visual_tokens"
        assert not fits_at_least_area(least, (height, width), bounds, factor, budget)
        return
    frames, *size = within
    assert visual_tokens(frames, *size, factor) <= budget
    assert frames % 2 == 0 and least <= frames <= count
    assert size[0] * size[1] <= max(free[1] * free[2], video_max_pixels(frames, *bounds, factor))
    if visual_tokens(count, *free[1:], factor) <= budget:
        assert (frames, *size) == free
    if frames < count:
        assert not fits_at_least_area(frames + 2, (height, width), bounds, factor, budget)


def outcome(*arguments: Any) -> tuple[int, int, int] | str:
    """Number and size of the frames, or the reason of the refusal."""
    try:
        return frames_within(*arguments)
    except SampleError as error:
        return error.reason


def fits_at_least_area(frames: int, stored: tuple[int, int], bounds: tuple[int, int], factor: int, budget: int) -> bool:
    try:
        size = resized_size(*stored, bounds[0], bounds[0], factor)
    except SampleError:
        return False
    return visual_tokens(frames, *size, factor) <= budget

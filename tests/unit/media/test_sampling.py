"""Frame choice and sizes equal qwen-vl-utils' own functions; frames within a budget of visual tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vlm_pg.errors import SampleError
from vlm_pg.media import sampling
from vlm_pg.media.sampling import frames_within, resized_size, video_max_pixels, visual_tokens
from vlm_pg.media.settings import MediaSettings

vision_process = pytest.importorskip("qwen_vl_utils.vision_process")


@settings(deadline=None)
@given(
    total=st.integers(2, 20_000),
    video_fps=st.one_of(st.floats(0.5, 240), st.sampled_from([24, 25, 29.97002997002997, 30, 60])),
    fps=st.floats(0.1, 30),
    min_frames=st.integers(2, 20),
    extra=st.integers(0, 100),
)
@example(total=300, video_fps=30.0, fps=2.0, min_frames=4, extra=100)
def test_number_and_choice_of_frames(total: int, video_fps: float, fps: float, min_frames: int, extra: int):
    max_frames = min_frames + min_frames % 2 + extra
    element = {"fps": fps, "min_frames": min_frames, "max_frames": max_frames}
    expected = vision_process.smart_nframes(element, total, video_fps)
    count = sampling.num_sampled_frames(total, video_fps, fps, min_frames, max_frames)
    assert count == expected
    assert sampling.frame_indices(total, count) == torch.linspace(0, total - 1, count).round().long().tolist()


@settings(deadline=None)
@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    min_tokens=st.integers(1, 64),
    extra=st.integers(0, 1000),
    factor=st.sampled_from([28, 32, 14]),
)
@example(height=31, width=639, min_tokens=4, extra=16, factor=28)
@example(height=10, width=2000, min_tokens=4, extra=16, factor=28)
@example(height=10, width=2001, min_tokens=4, extra=16, factor=28)
def test_resized_size(height: int, width: int, min_tokens: int, extra: int, factor: int):
    min_pixels, max_pixels = min_tokens * factor**2, (min_tokens + extra) * factor**2
    try:
        expected = vision_process.smart_resize(height, width, factor, min_pixels, max_pixels)
    except ValueError:
        with pytest.raises(SampleError) as got:
            sampling.resized_size(height, width, min_pixels, max_pixels, factor)
        assert got.value.reason == "bad_aspect_ratio"
        return
    if 0 in expected:
        with pytest.raises(SampleError) as got:
            sampling.resized_size(height, width, min_pixels, max_pixels, factor)
        assert got.value.reason == "too_narrow"
        return
    assert sampling.resized_size(height, width, min_pixels, max_pixels, factor) == expected


def test_by_hand():
    assert sampling.frame_indices(10, 4) == [0, 3, 6, 9]
    assert sampling.num_sampled_frames(310, 30.0, 2.0, 4, 16) == 16
    assert sampling.num_sampled_frames(300, 30.0, 2.0, 4, 64) == 20
    assert sampling.num_sampled_frames(3, 30.0, 2.0, 4, 16) == 2
    assert sampling.resized_size(240, 426, 4 * 784, 128 * 784) == (224, 420)
    assert sampling.spread(sampling.Span(0, 310, 30.0), 16).sampled_fps == 16 / 310 * 30


def test_many_frames_share_the_budget_of_the_video():
    area = 28 * 28
    assert sampling.video_max_pixels(16, 4 * area, 128 * area, 28) == 128 * area
    assert sampling.video_max_pixels(16, 4 * area, 4000 * area, 28) == 768 * area
    assert sampling.video_max_pixels(768, 4 * area, 768 * area, 28) == pytest.approx(300 * area)
    assert sampling.video_max_pixels(768, 400 * area, 768 * area, 28) == int(400 * area * 1.05)


def test_average_fps_prefers_the_exact_fraction_the_timestamps_confirm():
    milliseconds = [round(index / 30, 3) for index in range(300)]
    assert sampling.average_fps(milliseconds, 30.0) == 30.0
    assert sampling.average_fps(milliseconds, 0.0) == pytest.approx(30.0, rel=1e-3)
    assert sampling.average_fps(milliseconds, 1000.0) == pytest.approx(30.0, rel=1e-3)
    uneven = [0.0, 0.1, 0.2, 4.0]
    assert sampling.average_fps(uneven, 10.0) == pytest.approx(3 / 4.0)


def test_faults():
    with pytest.raises(SampleError, match=r"all 2 frames .* same timestamp .* must increase\. Re-encode") as got:
        sampling.average_fps([1.0, 1.0], 30.0)
    assert got.value.reason == "corrupt_media"
    with pytest.raises(
        SampleError, match=r"has 1 frame\(s\)\. At least 2 are needed\. Use the file as an image"
    ) as got:
        sampling.num_sampled_frames(1, 30.0, 2.0, 4, 16)
    assert got.value.reason == "too_few_frames"
    with pytest.raises(SampleError, match=r"2010x10 \(aspect ratio 201\)\. Ratios up to 200 are allowed\. Crop"):
        sampling.resized_size(10, 2010, 1, math.inf)
    for empty in ((0, 100), (100, 0), (0, 0)):
        with pytest.raises(SampleError) as got:
            sampling.resized_size(*empty, 1, math.inf)
        assert got.value.reason == "bad_aspect_ratio"
    with pytest.raises(SampleError, match=r"639x31; .* At least 28 are needed\. Raise max_pixels, crop") as got:
        sampling.resized_size(31, 639, 4 * 784, 20 * 784)
    assert got.value.reason == "too_narrow"


def test_impossible_settings():
    with pytest.raises(
        ValidationError, match=r"min_frames is 6 and max_frames is 5: no even number .* Raise max_frames"
    ):
        MediaSettings(min_frames=6, max_frames=5)
    with pytest.raises(ValidationError, match=r"min_pixels is 100 and max_pixels is 50: .* Raise max_pixels or lower"):
        MediaSettings(min_pixels=100, max_pixels=50)
    with pytest.raises(ValidationError, match="image_min_pixels is 100 and image_max_pixels is 50"):
        MediaSettings(image_min_pixels=100, image_max_pixels=50)


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
def test_budget_by_hand(
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

"""Frames, rate and size equal those of qwen-vl-utils' ``fetch_video``, over random numbers; tables by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.qwen_video import fetch
from tests.support.refusals import refused
from vlm_pg.errors import SampleError
from vlm_pg.media import sampling
from vlm_pg.media.sampling import Part, Timeline, choose, frames_within, resized_size, video_max_pixels, visual_tokens
from vlm_pg.media.settings import MAX_FRAMES_LIMIT, MediaSettings

vision_process = pytest.importorskip("qwen_vl_utils.vision_process")


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
    with refused("corrupt_media", r"all 2 frames .* same timestamp .* must increase\. Re-encode"):
        sampling.average_fps([1.0, 1.0], 30.0)
    with pytest.raises(
        SampleError, match=r"has 1 frame\(s\)\. At least 2 are needed\. Use the file as an image"
    ) as got:
        sampling.num_sampled_frames(1, 30.0, 2.0, 4, 16)
    assert got.value.reason == "too_few_frames"
    with pytest.raises(SampleError, match=r"2010x10 \(aspect ratio 201\)\. Ratios up to 200 are allowed\. Crop"):
        sampling.resized_size(10, 2010, 1, math.inf)
    for empty in ((0, 100), (100, 0), (0, 0)):
        with refused("bad_aspect_ratio"):
            sampling.resized_size(*empty, 1, math.inf)
    with refused("too_narrow", r"639x31; .* At least 28 are needed\. Raise max_pixels, crop"):
        sampling.resized_size(31, 639, 4 * 784, 20 * 784)


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
    with refused("too_many_visual_tokens", words):
        frames_within(16, 16, HD, (4 * AREA, 128 * AREA), 28, 15)
    with refused("too_many_visual_tokens", "4 frames of 1920x1080"):
        frames_within(16, 4, HD, (64 * AREA, 128 * AREA), 28, 60)
    with refused("too_narrow"):
        frames_within(16, 4, (31, 639), (4 * AREA, 20 * AREA), 28, 1000)


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


# ten frames a second for a second, then one every half second
UNEVEN = [index / 10 for index in range(10)] + [1.0, 1.5, 2.0, 2.5, 3.0]
ALL = MediaSettings(fps=1000, max_frames=64)


def timeline(seconds: list[float], fps: float, tick: Fraction = Fraction(1, 90_000), first: float = 0.0) -> Timeline:
    return Timeline.of([first + second for second in seconds], tick, fps)


def constant(total: int, fps: float, tick: Fraction = Fraction(1, 90_000)) -> Timeline:
    """Timestamps as a container of this tick rounds them."""
    return timeline([float(round(index / fps / tick) * tick) for index in range(total)], fps, tick)


def chosen(line: Timeline, settings: MediaSettings = ALL, **part: object) -> tuple[int, ...]:
    return choose(line, Part(**part), settings, "a.mp4").indices  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
        (0.2, None, (2, 3, 4, 5, 6, 7, 8, 9)),
        (None, 0.3, (0, 1, 2, 3)),
        (0.2, 0.5, (2, 3, 4, 5)),
        (0.21, 0.69, (3, 4, 5, 6)),
        (0.45, 7.0, (5, 6, 8, 9)),  # five frames, of which an even number: 5, 6.33, 7.67, 9
        (0.8, 0.9, (8, 9)),
    ],
)
def test_a_clip_of_ten_frames_a_second(start: float | None, end: float | None, expected: tuple[int, ...]) -> None:
    assert chosen(constant(10, 10.0), start=start, end=end) == expected


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.8, 2.0, (8, 9, 11, 12)),  # 8 to 12: 8, 9.33, 10.67, 12
        (1.0, None, (10, 11, 13, 14)),
        (1.4, 2.1, (11, 12)),
        (None, 0.15, (0, 1)),
        (2.5, 99.0, (13, 14)),
    ],
)
def test_a_clip_of_a_variable_rate(start: float | None, end: float | None, expected: tuple[int, ...]) -> None:
    """By timestamps: at the mean rate of 15 frames in 3 s, 1.4 s would be frame 7."""
    for first in (0.0, 1.4, 95_000.0):
        assert chosen(timeline(UNEVEN, 5.0, first=first), start=start, end=end) == expected


def test_the_rate_of_a_clip() -> None:
    """Of a constant rate that of the video, as in qwen-vl-utils; else the clip's own, so that fps means seconds."""
    two = MediaSettings(fps=2.0, min_frames=2, max_frames=64)
    even = choose(constant(300, 30.0), Part(2.0, 5.0), two, "a.mp4")
    assert len(even.indices) == 6  # 91 frames of 30 a second are 3.03 s
    assert even.indices == (60, 78, 96, 114, 132, 150)
    assert even.sampled_fps == 6 / 91 * 30.0
    fast = choose(timeline(UNEVEN, 4.67), Part(0.0, 0.95), two, "a.mp4")
    slow = choose(timeline(UNEVEN, 4.67), Part(1.0, 3.0), two, "a.mp4")
    assert (fast.indices, slow.indices) == ((0, 9), (10, 11, 13, 14))
    assert fast.sampled_fps == pytest.approx(2 / 10 * 10.0)
    assert slow.sampled_fps == pytest.approx(4 / 5 * 2.0)


@pytest.mark.parametrize("tick", [Fraction(1, 1000), Fraction(1, 600), Fraction(1, 90_000), Fraction(1, 30)])
def test_rounded_timestamps_lose_no_frame(tick: Fraction) -> None:
    """A clip from one frame's exact time to another's holds both, whatever the container rounds to."""
    line = constant(300, 30.0, tick)
    for first, last in ((1, 3), (2, 4), (7, 11), (100, 299)):
        got = choose(line, Part(first / 30, last / 30), ALL, "a.mp4")
        assert (got.indices[0], got.indices[-1]) == (first, last)
    assert chosen(line, start=0.98 / 30, end=4.02 / 30) == (1, 2, 3, 4)
    assert chosen(line, start=0.51 / 30, end=4.49 / 30) == (1, 2, 3, 4)  # half a frame is no rounding


def test_a_constant_rate_is_counted_as_by_qwen_vl_utils() -> None:
    """4.1 * 30 is 122.99999999999999, so that frame 123, at 4.1 s, is left out there, and here too."""
    assert chosen(constant(300, 30.0), start=4.0, end=4.1) == (120, 122)
    assert chosen(timeline(UNEVEN, 5.0), start=0.0, end=0.7)[-1] == 7


def test_long_ticks_are_exact() -> None:
    """Half a tick of a clock that ticks once a frame would be half a frame."""
    line = timeline(UNEVEN, 5.0, Fraction(1, 10))
    assert chosen(line, start=0.96, end=2.04) == (10, 12)
    assert chosen(line, times=(0.96, 1.46)) == (9, 10)


def test_rounded_timestamps_of_a_variable_rate() -> None:
    """Thirds of a second in milliseconds, one of them left out: 1/3 s is 0.333."""
    seconds = [round(index / 3, 3) for index in range(30) if index != 4]
    assert chosen(timeline(seconds, 3.0, Fraction(1, 1000)), start=1 / 3, end=1.0) == (1, 3)
    assert chosen(timeline(seconds, 3.0, Fraction(1, 1000)), times=(1 / 3, 2 / 3)) == (1, 2)
    assert chosen(timeline(seconds, 3.0, Fraction(1, 1000)), times=(0.332, 0.666)) == (0, 1)


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        (10.0, None, r"from 10 s to 3\.\d* s holds fewer than 2 frames of video 'a\.mp4', which has 15 in 3\.\d\d s"),
        (4.0, 5.0, "from 4 s to 5 s holds fewer"),
        (1.1, 1.6, r"from 1\.1 s to 1\.6 s holds fewer .* At least 2 are needed\. Correct its start or end"),
        (None, 0.05, r"from 0 s to 0\.05 s holds fewer"),
        (1.1, 1.2, "holds fewer"),
    ],
)
def test_a_clip_without_two_frames(start: float | None, end: float | None, words: str) -> None:
    for line in (timeline(UNEVEN, 5.0), timeline(UNEVEN, 0.0)):
        with refused("bad_clip", words):
            chosen(line, start=start, end=end)
    with refused("bad_clip", "holds fewer than 2 frames"):
        chosen(constant(10, 10.0), start=1.0, end=3.0)


@pytest.mark.parametrize(
    ("times", "expected", "rate"),
    [
        ((0.0, 0.1), (0, 1), 10.0),
        ((0.09, 0.19, 1.49, 1.5), (0, 1, 10, 11), 3 / 1.41),
        ((0.5, 2.0, 2.9), (5, 12, 13, 13), 2 / 2.4),  # an odd number: the last one twice
        ((1.1, 1.2, 1.3, 1.4), (10, 10, 10, 10), 3 / 0.3),  # one frame is on display at all of them
        ((3.2,), (14, 14), 14 / 3),  # the last frame is shown as long as frames are on average
    ],
)
def test_moments(times: tuple[float, ...], expected: tuple[int, ...], rate: float) -> None:
    for first in (0.0, 7.5):
        got = choose(timeline(UNEVEN, 5.0, first=first), Part(times=times), MediaSettings(), "a.mp4")
        assert got.indices == expected
        assert got.sampled_fps == pytest.approx(rate)


def test_more_moments_than_max_frames() -> None:
    times = tuple(index / 10 for index in range(50))
    assert chosen(constant(50, 10.0), MediaSettings(max_frames=4), times=times) == tuple(range(50))


def test_a_moment_after_the_end() -> None:
    assert chosen(constant(10, 10.0), times=(0.0, 1.0)) == (0, 9)
    with refused("bad_clip", r"asks for 1\.01 s of video 'a\.mp4', which ends at 1\.00 s\. Moments"):
        chosen(constant(10, 10.0), times=(0.0, 1.01))


def test_uniform() -> None:
    uniform = MediaSettings(frames="uniform", num_frames=4, fps=0.1, max_frames=2, min_frames=2)
    assert chosen(constant(10, 10.0), uniform) == (0, 3, 6, 9)
    assert chosen(constant(4, 10.0), uniform) == (0, 1, 2, 3)
    assert chosen(constant(10, 10.0), uniform, start=0.2, end=0.8) == (2, 4, 6, 8)
    assert choose(constant(10, 10.0), Part(0.2, 0.8), uniform, "a.mp4").sampled_fps == pytest.approx(4 / 7 * 10)
    assert chosen(constant(10, 10.0), uniform, times=(0.1, 0.2)) == (1, 2)
    with refused("too_few_frames", r"has 3 frame\(s\)\. media\.num_frames=4 are .* min_frames and max_frames 4 a"):
        chosen(constant(10, 10.0), uniform, start=0.2, end=0.4)


def test_impossible_settings() -> None:
    for changes, message in (
        ({"min_frames": 6, "max_frames": 5}, r"min_frames is 6 and max_frames is 5: no even number .* Raise"),
        ({"min_pixels": 100, "max_pixels": 50}, r"min_pixels is 100 and max_pixels is 50: .* Raise max_pixels or"),
        ({"image_min_pixels": 100, "image_max_pixels": 50}, "image_min_pixels is 100 and image_max_pixels is 50"),
        ({"frames": "uniform"}, r"frames is uniform and num_frames is None: .* Give both, or neither"),
        ({"num_frames": 8}, "frames is fps and num_frames is 8"),
        ({"frames": "uniform", "num_frames": 7}, "multiple of 2"),
        ({"min_frames": 8, "video_tokens": 3}, r"video_tokens is 3, fewer .* 8 frames need\. Raise video_tokens or"),
    ):
        with pytest.raises(ValidationError, match=message):
            MediaSettings(**changes)
    assert MediaSettings(min_frames=8, video_tokens=4).fewest_frames == 8
    assert MediaSettings(min_frames=5, max_frames=7).fewest_frames == 6
    assert (MediaSettings(max_frames=7).most_frames, MediaSettings(max_frames=3600).most_frames) == (6, 3600)
    assert MediaSettings(frames="uniform", num_frames=32).most_frames == 32
    assert MAX_FRAMES_LIMIT >= 4 * 3600


def test_an_hour_of_frames() -> None:
    """3,600 frames of an hour, and all that may be asked for."""
    line = constant(3600 * 30, 30.0)
    hour = chosen(line, MediaSettings(fps=1.0, max_frames=MAX_FRAMES_LIMIT))
    assert len(hour) == 3600 and hour[0] == 0 and hour[-1] == 3600 * 30 - 1
    assert {later - earlier for earlier, later in itertools.pairwise(hour)} == {30, 31}
    assert len(chosen(line, MediaSettings(fps=30.0, max_frames=MAX_FRAMES_LIMIT))) == MAX_FRAMES_LIMIT


def test_a_last_picture_that_is_held() -> None:
    """Slides at 0, 10 and 20 s, the last one until 60 s: clips and moments of it show what is on display."""
    slides = timeline([0.0, 10.0, 20.0], 0.1)
    held = replace(slides, shown_until=60.0)
    assert (slides.end, held.end, replace(slides, shown_until=20.04).end) == (30.0, 60.0, 30.0)
    assert chosen(held, times=(45.0,)) == (2, 2)
    assert chosen(held) == chosen(slides) == (0, 2) and chosen(held, start=5.0, end=50.0) == (1, 2)
    for start, end, expected in ((25, 58, (2, 2)), (20.5, 20.6, (2, 2)), (15, 99, (1, 2)), (59, None, (2, 2))):
        choice = choose(held, Part(start, end), ALL, "a.mp4")
        assert choice.indices == expected and choice.sampled_fps == pytest.approx(1 / (min(end or 60, 60) - start))
    for line, start, end in ((slides, 21.0, 29.0), (held, 12.0, 18.0), (held, 61.0, 70.0), (held, 60.0, None)):
        with pytest.raises(SampleError, match=f"from {start:g} s .* holds fewer than 2 frames"):
            chosen(line, start=start, end=end)
    with pytest.raises(SampleError, match="holds fewer than 2 frames"):
        chosen(held, MediaSettings(frames="uniform", num_frames=4), start=25.0, end=58.0)


@pytest.mark.parametrize("total", [2, 3, 16, 33, 1001])
@pytest.mark.parametrize("rate", [0.5, 29.97, 59.94])
def test_the_last_frame_of_a_whole_video_is_shown_whatever_its_length_and_rate(total: int, rate: float) -> None:
    line = constant(total, rate)
    limits = [MediaSettings(fps=fps, max_frames=most) for fps, most in ((2.0, 16), (0.3, 768), (1000.0, 16_384))]
    limits += [MediaSettings(frames="uniform", num_frames=count) for count in (2, 4, 32, 768) if count <= total]
    for chosen_settings in limits:
        choice = choose(line, Part(), chosen_settings, "a.mp4")
        for count in range(2, len(choice.indices) + 1, 2 if len(choice.indices) < 100 else 1000):
            assert choice.with_count(count).indices[-1] == total - 1, "and where a budget of tokens takes some away"


@pytest.mark.parametrize(
    ("part", "shows_it"),
    [
        ({}, True),
        ({"start": 0.4}, True),
        ({"start": 0.2, "end": 0.9}, True),
        ({"end": 7.0}, True),
        ({"end": 0.89}, False),
        ({"times": (0.0, 0.95)}, True),
        ({"times": (0.0, 0.89)}, False),
    ],
)
def test_a_part_without_the_last_frame_is_refused_where_it_must_be_shown(part: dict, shows_it: bool) -> None:
    settings = ALL.model_copy(update={"last_frame": "always"})
    if shows_it:
        assert chosen(constant(10, 10.0), settings, **part)[-1] == 9
        return
    assert chosen(constant(10, 10.0), **part)[-1] == 8
    with refused("bad_clip", r"at 0\.8 s, its last one at 0\.9 s\. With media\.last_frame=always"):
        chosen(constant(10, 10.0), settings, **part)


RATES = (Fraction(24), Fraction(25), Fraction(30), Fraction(30000, 1001), Fraction(60), Fraction(24000, 1001))


def case(numbers: random.Random) -> dict[str, Any]:
    """A video, settings and a clip; sides, lengths and limits are spread over their orders of magnitude."""

    def spread(low: float, high: float) -> float:
        return math.exp(numbers.uniform(math.log(low), math.log(high)))

    rate = float(numbers.choice(RATES)) if numbers.random() < 0.7 else spread(0.5, 240)
    total = max(1, round(spread(0.05, 3600) * rate))
    factor = numbers.choice((28, 32))
    least = round(spread(1, 256)) * factor**2 - numbers.choice((0, 0, 5))
    settings = {"min_pixels": least, "max_pixels": least + round(spread(1, 1500 * factor**2))}
    if numbers.random() < 0.25:
        settings |= {"frames": "uniform", "num_frames": 2 * round(spread(1, 200))}
    else:
        low = round(spread(2, 64))
        settings |= {"fps": spread(0.1, 30), "min_frames": low}
        settings["max_frames"] = low + low % 2 + round(spread(1, 4096))
    length = total / rate
    # ends on the frames themselves, as people write them, and anywhere
    ends = sorted(round(numbers.uniform(0, 1.2 * length), numbers.choice((0, 1, 2, 12))) for _ in range(2))
    clip = {name: end if numbers.random() < 0.7 else None for name, end in zip(("start", "end"), ends, strict=True)}
    narrow = numbers.random() < 0.1
    return {
        "height": round(spread(1, 40 if narrow else 4000)),
        "width": round(spread(1, 8000)),
        "total": total,
        "rate": rate,
        "factor": factor,
        "settings": settings,
        "clip": clip if numbers.random() < 0.6 else {},
    }


def ours(drawn: dict[str, Any]) -> tuple[list[int], float, int, int]:
    settings, total, rate = MediaSettings(**drawn["settings"]), drawn["total"], drawn["rate"]
    timeline = Timeline(np.arange(total) / rate, rate, rate, 1e-6)
    choice = choose(timeline, Part(**drawn["clip"]), settings, "a.mp4")
    bounds = settings.min_pixels, settings.max_pixels
    count = len(choice.indices)
    frames = frames_within(count, 2, (drawn["height"], drawn["width"]), bounds, drawn["factor"])
    assert frames[0] == count
    return list(choice.indices), choice.sampled_fps, *frames[1:]


def theirs(ask: Any, drawn: dict[str, Any]) -> tuple[list[int], float, int, int]:
    element = {key: value for key, value in drawn["settings"].items() if key not in ("frames", "num_frames")}
    if "num_frames" in drawn["settings"]:
        element["nframes"] = drawn["settings"]["num_frames"]
    clip = {f"video_{name}": end for name, end in drawn["clip"].items() if end is not None}
    video = {"height": drawn["height"], "width": drawn["width"], "total": drawn["total"], "fps": drawn["rate"]}
    return ask(element | clip, drawn["factor"], **video)


REASONS = {"bad_clip", "too_few_frames", "bad_aspect_ratio", "too_narrow"}


@pytest.mark.parametrize("cases", [3_000, pytest.param(100_000, marks=pytest.mark.matrix)])
def test_frames_rate_and_size(monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    numbers = random.Random(f"frames/{cases}")
    ask = fetch(monkeypatch, 1, 1, 1, 1.0)
    seen: Counter[str] = Counter()
    for _ in range(cases):
        drawn = case(numbers)
        try:
            expected = theirs(ask, drawn)
        except (ValueError, ZeroDivisionError):
            expected = None
        if expected is None or 0 in expected[2:]:
            with pytest.raises(SampleError) as got:
                ours(drawn)
            assert got.value.reason in REASONS, drawn
            seen[got.value.reason] += 1
            continue
        assert ours(drawn) == expected, drawn
        seen["clip" if any(end is not None for end in drawn["clip"].values()) else "whole"] += 1
    assert all(seen[what] > cases // 500 for what in (*REASONS, "clip", "whole")), seen

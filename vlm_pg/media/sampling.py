"""Which frames of a video are shown, at which size, within which limits and token budget: functions on numbers.

The rules are qwen-vl-utils' own (``smart_nframes``, ``calculate_video_frame_range``, ``smart_resize`` and the pixel
budget of ``fetch_video``), so that a model sees here what it saw when it was pretrained. They run in the main process
(``worker.call_in_parent``): a worker would import torchvision for them.

Times are seconds since the video's first frame; indices count its frames in presentation order.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from types import ModuleType

import numpy as np

from vlm_pg.errors import SampleError
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.worker import call_in_parent
from vlm_pg.types import MediaRef

FRAME_MULTIPLE = 2
MAX_ASPECT_RATIO = 200
# qwen-vl-utils' pixel budget of a video, counted in merged patches ("tokens") of factor x factor pixels
FRAME_MAX_TOKENS = 768
VIDEO_TOTAL_TOKENS = 128_000 * 0.9
# how far the container's stated rate may lie from the timestamps before the timestamps are believed instead
RATE_TOLERANCE = 0.02
# No container rounds timestamps to more than 1/500 s: those with longer ticks (a tick a frame) are exact.
MOST_ROUNDING_SECONDS = 0.001
_FLOAT_SECONDS = 1e-6


@cache
def _reference() -> ModuleType:
    """qwen-vl-utils: imported with the first medium, not before."""
    from qwen_vl_utils import vision_process

    vision_process.logger.setLevel(logging.ERROR)  # it would warn of every short video
    return vision_process


def average_fps(pts_seconds: Sequence[float], stated_fps: float) -> float:
    """Frames per second of a stored video.

    The container's own figure is taken when the timestamps agree with it: it is an exact fraction, while timestamps
    are rounded (Matroska: to milliseconds) and the frame count below rounds down, so 29.999 instead of 30 would lose
    two frames. Where they disagree, e.g. with a variable rate, the timestamps count.

    ``pts_seconds``: ascending, at least two. ``stated_fps``: the container's average rate; 0 when it states none.
    """
    span_seconds = pts_seconds[-1] - pts_seconds[0]
    if span_seconds <= 0:
        raise SampleError(
            "corrupt_media",
            f"all {len(pts_seconds)} frames of the video carry the same timestamp ({pts_seconds[0]} s). Frame times "
            "must increase. Re-encode the file, or remove the sample.",
        )
    measured_fps = (len(pts_seconds) - 1) / span_seconds
    if stated_fps > 0 and abs(stated_fps - measured_fps) <= RATE_TOLERANCE * measured_fps:
        return stated_fps
    return measured_fps


def num_sampled_frames(total: int, video_fps: float, fps: float, min_frames: int, max_frames: int) -> int:
    """How many of ``total`` stored frames are read: even, and never more than there are.

    Raises:
        SampleError: ``too_few_frames`` for a video of fewer than two frames.
    """
    if total < FRAME_MULTIPLE:
        raise SampleError(
            "too_few_frames",
            f"the video has {total} frame(s). At least {FRAME_MULTIPLE} are needed. Use the file as an image, or "
            "remove the sample.",
        )
    wanted = {"fps": fps, "min_frames": min_frames, "max_frames": max_frames}
    return int(_reference().smart_nframes(wanted, total, video_fps))


def num_uniform_frames(total: int, num_frames: int) -> int:
    """``num_frames`` (even), where there are so many. Raises SampleError: ``too_few_frames``."""
    if total < num_frames:
        raise SampleError(
            "too_few_frames",
            f"the video or its clip has {total} frame(s). media.num_frames={num_frames} are to be shown of each. Lower "
            f"media.num_frames, set media.frames=fps (with min_frames and max_frames {num_frames} a shorter video is "
            "shown with as many as it has), or remove the sample.",
        )
    return int(_reference().smart_nframes({"nframes": num_frames}, total, 1.0))


def clip_range(total: int, video_fps: float, start: float | None, end: float | None) -> tuple[int, int] | None:
    """First and last of ``total`` frames of a constant rate that a clip holds, times in seconds.

    None where qwen-vl-utils takes the clip for none: it holds fewer than two frames.
    """
    clip = {"video_start": start, "video_end": end}
    try:
        first, last, _ = _reference().calculate_video_frame_range(clip, total, video_fps)
    except ValueError:
        return None
    return int(first), int(last)


def frame_indices(total: int, count: int, first: int = 0) -> list[int]:
    """``count`` indices spread evenly over ``total`` ones from ``first`` on, both ends included, ascending.

    ``frame_indices(10, 4) == [0, 3, 6, 9]``. Computed by ``torch.linspace`` in float32 like the reference, whose
    rounding of halves would be hard to imitate otherwise.
    """
    import torch

    return torch.linspace(first, first + total - 1, count).round().long().tolist()


def video_max_pixels(count: int, min_pixels: int, max_pixels: int, factor: int) -> float:
    """The largest area of one frame: ``max_pixels``, lowered when many frames share the budget of the whole video."""
    area = factor * factor
    share = VIDEO_TOTAL_TOKENS * area / count * FRAME_MULTIPLE
    return min(max_pixels, max(min(FRAME_MAX_TOKENS * area, share), int(min_pixels * 1.05)))


def check_aspect_ratio(height: int, width: int) -> None:
    """Raise SampleError ``bad_aspect_ratio`` for an empty picture or one more than 200 times as long as wide."""
    ratio = max(height, width) / max(min(height, width), 1)
    if min(height, width) < 1 or ratio > MAX_ASPECT_RATIO:
        raise SampleError(
            "bad_aspect_ratio",
            f"the picture is {width}x{height} (aspect ratio {ratio:.0f}). Ratios up to {MAX_ASPECT_RATIO} are allowed. "
            "Crop the file, or remove the sample.",
        )


def resized_size(height: int, width: int, min_pixels: float, max_pixels: float, factor: int = 28) -> tuple[int, int]:
    """Height and width as multiples of ``factor``, area within the bounds, aspect kept as well as possible.

    Raises:
        SampleError: ``bad_aspect_ratio`` above 200, ``too_narrow`` when a side would shrink to nothing.
    """
    check_aspect_ratio(height, width)
    new_height, new_width = _reference().smart_resize(height, width, factor, min_pixels, max_pixels)
    if new_height == 0 or new_width == 0:
        raise SampleError(
            "too_narrow",
            f"the picture is {width}x{height}; scaled down to {max_pixels:.0f} pixels, a side would be shorter than "
            f"{factor} pixels. At least {factor} are needed. Raise max_pixels, crop the file, or remove the sample.",
        )
    return new_height, new_width


def visual_tokens(count: int, height: int, width: int, factor: int) -> int:
    """Tokens of ``count`` frames after the merger: two frames of ``factor`` x ``factor`` pixels make one."""
    return count // FRAME_MULTIPLE * (height // factor) * (width // factor)


def frames_within(
    count: int, least: int, stored: tuple[int, int], bounds: tuple[int, int], factor: int, budget: int | None = None
) -> tuple[int, int, int]:
    """Number, height and width of the frames of one video.

    First the area of a frame is lowered, down to the least one; only then are frames taken away.

    Args:
        count, least: how many frames are wanted (even), and how few they may become.
        stored: height and width of the stored frames, upright.
        bounds: least and largest area of a frame, in pixels.
        budget: most visual tokens of the video; None for no limit.

    Raises:
        SampleError: ``bad_aspect_ratio``, ``too_narrow``, or ``too_many_visual_tokens`` where the fewest frames of the
            least area are above the budget.
    """

    def size_of(frames: int, limit: float = math.inf) -> tuple[int, int]:
        largest = min(video_max_pixels(frames, *bounds, factor), limit)
        return resized_size(*stored, bounds[0], largest, factor)

    size = size_of(count)
    if budget is None:
        return count, *size
    for frames in range(count, least - 1, -FRAME_MULTIPLE):
        share = budget // (frames // FRAME_MULTIPLE) * factor**2
        for limit in (math.inf, max(share, bounds[0])):
            try:
                size = size_of(frames, limit)
            except SampleError:  # it would become too narrow, and fewer frames may be larger
                continue
            if visual_tokens(frames, *size, factor) <= budget:
                return frames, *size
    raise SampleError(
        "too_many_visual_tokens",
        f"{least} frames of {stored[1]}x{stored[0]} pixels, the fewest that may be shown of this video, take more than "
        f"{budget} visual tokens, even scaled to {bounds[0]} pixels each. At most media.video_tokens are allowed. "
        "Raise it, lower media.min_pixels, or show fewer frames (media.min_frames, or the record's times).",
    )


def check_frame_size(name: str, width: int, height: int, settings: MediaSettings) -> None:
    """Refuse by what is stated of a frame's size; 0 stands for "not stated".

    Raises:
        SampleError: ``video_too_large``, ``bad_aspect_ratio``.
    """
    if width * height > settings.max_video_frame_pixels:
        raise too_large(name, f"it has frames of {width}x{height} pixels", settings)
    if width and height:
        check_aspect_ratio(height, width)


def check_length(name: str, seconds: float, settings: MediaSettings) -> None:
    """Raises SampleError ``video_too_long``."""
    if seconds > settings.max_video_seconds:
        raise SampleError(
            "video_too_long",
            f"video '{name}' lasts {seconds:.0f} s. At most {settings.max_video_seconds:.0f} s are allowed. Cut "
            "the file, or raise media.max_video_seconds.",
        )


def too_large(name: str, cause: str, settings: MediaSettings) -> SampleError:
    """``video_too_large``."""
    return SampleError(
        "video_too_large",
        f"video '{name}' is too large: {cause}. At most {settings.max_video_frame_pixels} pixels are allowed. Scale "
        "the file down, or raise media.max_video_frame_pixels.",
    )


@dataclass(frozen=True)
class Part:
    """What a record means of a video: the clip from ``start`` to ``end``, or the moments ``times``; else all of it.

    ``folder_fps``: of a folder of pictures, how many of them are shown a second; None of a file.
    """

    start: float | None = None
    end: float | None = None
    times: tuple[float, ...] = ()
    folder_fps: float | None = None

    @classmethod
    def of(cls, ref: MediaRef) -> Part:
        """The part that a reference names."""
        return cls(ref.start, ref.end, ref.times, ref.folder_fps)


WHOLE = Part()


@dataclass(frozen=True)
class Timeline:
    """When the frames of a video are shown, from 0 on, ascending, and how many are shown a second on average.

    ``tolerance``: how far, in seconds, a timestamp may be from the time it stands for. Containers with a clock of their
    own (Matroska: milliseconds) round: at 30 frames per second the second frame is at 0.033 s, and a clip that begins
    at 1/30 s would lose it. So half a tick is allowed, as far as ticks come from rounding.

    ``shown_until``: when the file says that the last frame has been shown; 0 where it says nothing. ``clock_zero``,
    ``clock_end``: when a player's clock, on which subtitles are, is at 0 and when the file ends. Sound may begin before
    the first frame and go on after the last one.
    """

    seconds: Sequence[float]
    fps: float
    stated_fps: float
    tolerance: float
    shown_until: float = 0.0
    clock_zero: float = 0.0
    clock_end: float = 0.0

    @classmethod
    def of(
        cls,
        pts_seconds: Sequence[float],
        time_base: Fraction,
        stated_fps: float,
        shown_until: float | None = None,
        clock: tuple[float, float] | None = None,
    ) -> Timeline:
        """Of presentation times that begin anywhere; ``shown_until`` and ``clock`` (its 0 and its end) are such times.

        Raises:
            SampleError: ``corrupt_media`` where all frames have one time.
        """
        fps = average_fps(pts_seconds, stated_fps) if len(pts_seconds) > 1 else stated_fps or 1.0
        first = pts_seconds[0]
        seconds = [second - first for second in pts_seconds]
        until = 0.0 if shown_until is None else shown_until - first
        # Of pictures before the clock's zero there are some that no player shows, so it does not lie after the first.
        zero, end = (0.0, 0.0) if clock is None else (min(0.0, clock[0] - first), clock[1] - first)
        return cls(seconds, fps, stated_fps, min(float(time_base) / 2, MOST_ROUNDING_SECONDS), until, zero, end)

    @property
    def end(self) -> float:
        """When the last frame has been shown as long as frames are on average, or longer, as the file says."""
        return max(self.seconds[-1] + 1 / self.fps, self.shown_until)

    def has_constant_rate(self) -> bool:
        """Whether every frame is where ``fps`` puts it; the first one may be rounded too."""
        expected = np.arange(len(self.seconds)) / self.fps
        return bool(np.abs(np.asarray(self.seconds) - expected).max() <= 2 * self.tolerance + _FLOAT_SECONDS)


@dataclass(frozen=True)
class Span:
    """``total`` frames from index ``first`` on, of which some are shown; ``fps`` of them are stored a second."""

    first: int
    total: int
    fps: float


@dataclass(frozen=True)
class Choice:
    """The frames that are shown: their indices, ascending, and how many a second they are.

    ``span``: what they are spread over; None for explicit moments, of which none can be left out.
    """

    indices: tuple[int, ...]
    sampled_fps: float
    span: Span | None = None

    def with_count(self, count: int) -> Choice:
        """So many frames, spread over the same span. Moments have the number they have."""
        return self if self.span is None or count == len(self.indices) else spread(self.span, count)


def choose(timeline: Timeline, part: Part, settings: MediaSettings, name: str) -> Choice:
    """The frames of a video that a record and the settings select.

    With ``last_frame: always`` the last of them is the video's. ``spread`` takes both ends of a span, however many
    frames of it are shown, so without a clip and without moments it always is.

    Raises:
        SampleError: ``bad_clip``, or ``too_few_frames`` of a video.
    """
    ends = held_ends(timeline, part) if settings.num_frames is None and not part.times else None
    if part.times or ends:
        choice = moments(timeline, part.times or ends or (), name)
    else:
        span = span_of(timeline, part, name)
        if settings.num_frames is not None:
            count = call_in_parent(num_uniform_frames, span.total, settings.num_frames)
        else:
            bounds = settings.min_frames, settings.max_frames
            count = call_in_parent(num_sampled_frames, span.total, span.fps, settings.fps, *bounds)
        choice = spread(span, count)
    last = len(timeline.seconds) - 1
    if settings.last_frame == "always" and choice.indices[-1] != last:
        raise SampleError(
            "bad_clip",
            f"the last frame that is to be shown of video '{name}' is at {timeline.seconds[choice.indices[-1]]:g} s, "
            f"its last one at {timeline.seconds[last]:g} s. With media.last_frame=always that one must be shown. "
            "Correct the record's clip or moments, or set media.last_frame=as_sampled.",
        )
    return choice


def spread(span: Span, count: int) -> Choice:
    """``count`` frames from the first to the last of a span."""
    indices = tuple(frame_indices(span.total, count, span.first))
    return Choice(indices, count / span.total * span.fps, span)


def held_ends(timeline: Timeline, part: Part) -> tuple[float, float] | None:
    """Both ends of a clip of the last picture where that is held (slides, credits) and at most itself begins in it.

    All that such a clip shows are the pictures on display at its ends. Held means twice as long as usual, or longer.
    """
    seconds, late = timeline.seconds, timeline.tolerance + _FLOAT_SECONDS
    if timeline.shown_until < seconds[-1] + 2 / timeline.fps or len(seconds) < FRAME_MULTIPLE:
        return None
    start, end = part.start or 0.0, timeline.end if part.end is None else min(part.end, timeline.end)
    return (start, end) if start > seconds[-2] + late and end > max(start, seconds[-1]) else None


def span_of(timeline: Timeline, part: Part, name: str) -> Span:
    """The frames of a clip, both ends included, or of the whole video.

    Of a constant rate these are the frames that qwen-vl-utils counts, bit for bit; else those whose timestamps lie in
    the clip, and the rate is the clip's own. An end beyond the video's is the video's.

    Raises:
        SampleError: ``bad_clip`` for a clip of fewer than two frames.
    """
    seconds, total = timeline.seconds, len(timeline.seconds)
    if total < FRAME_MULTIPLE or (part.start is None and part.end is None):
        return Span(0, total, timeline.fps)
    start, end = part.start or 0.0, timeline.end if part.end is None else part.end
    is_constant = timeline.has_constant_rate()
    if is_constant:
        first, last = call_in_parent(clip_range, total, timeline.fps, part.start, part.end) or (0, -1)
    else:
        first = bisect_left(seconds, start - timeline.tolerance)
        last = bisect_right(seconds, end + timeline.tolerance) - 1
    if last - first + 1 < FRAME_MULTIPLE:
        raise SampleError(
            "bad_clip",
            f"the clip from {start:g} s to {end:g} s holds fewer than {FRAME_MULTIPLE} frames of video "
            f"'{name}', which has {total} in {timeline.end:.2f} s. At least {FRAME_MULTIPLE} are needed. "
            "Correct its start or end, or remove the record.",
        )
    fps = timeline.fps if is_constant else average_fps(seconds[first : last + 1], timeline.stated_fps)
    return Span(first, last - first + 1, fps)


def moments(timeline: Timeline, times: Sequence[float], name: str) -> Choice:
    """The frame on display at each moment. Of an odd number the last one comes twice, as in qwen-vl-utils.

    ``sampled_fps`` is the mean rate of the moments, 2 / s for 0, 0.1 and 1 s: models that get no times count
    frames, and so are right about when the last one is shown. A single moment has no rate, and no other frame whose
    distance the rate would tell: it gets the video's.

    Raises:
        SampleError: ``bad_clip`` for a moment after the video's end.
    """
    if times[-1] > timeline.end + timeline.tolerance + _FLOAT_SECONDS:
        raise SampleError(
            "bad_clip",
            f"'times' asks for {times[-1]:g} s of video '{name}', which ends at {timeline.end:.2f} s. Moments of the "
            "video are expected. Correct 'times', or remove the record.",
        )
    late = timeline.tolerance + _FLOAT_SECONDS
    indices = [bisect_right(timeline.seconds, time + late) - 1 for time in times]
    indices += indices[-1:] * (-len(indices) % FRAME_MULTIPLE)
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else timeline.fps
    return Choice(tuple(indices), rate)

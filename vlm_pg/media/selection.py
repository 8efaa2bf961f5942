"""Which frames of a video are shown: the part that its record means, and evenly so many of that part.

Times are seconds since the video's first frame, places count the frames of its index in the order they are shown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from vlm_pg.errors import SampleError
from vlm_pg.media import sampling
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.worker import ask
from vlm_pg.types import MediaRef

# No container rounds timestamps to more than 1/500 s: those with longer ticks (a tick a frame) are exact.
MOST_ROUNDING_SECONDS = 0.001
_FLOAT_SECONDS = 1e-6


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
        fps = sampling.average_fps(pts_seconds, stated_fps) if len(pts_seconds) > 1 else stated_fps or 1.0
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
    """``total`` frames from place ``first`` on, of which some are shown; ``fps`` of them are stored a second."""

    first: int
    total: int
    fps: float


@dataclass(frozen=True)
class Choice:
    """The frames that are shown: their places, ascending, and how many a second they are.

    ``span``: what they are spread over; None for explicit moments, of which none can be left out.
    """

    indices: tuple[int, ...]
    sampled_fps: float
    span: Span | None = None

    def with_count(self, count: int) -> Choice:
        """So many frames, spread over the same span. Moments have the number they have."""
        return self if self.span is None or count == len(self.indices) else spread(self.span, count)


def choose(timeline: Timeline, part: Part, settings: MediaSettings, name: str) -> Choice:
    """The frames of a video that a record and the settings ask for.

    With ``last_frame: always`` the last of them is the video's. ``spread`` takes both ends of a span, however many
    frames of it are shown, so without a clip and without moments it always is.

    Raises:
        SampleError: ``bad_clip``, or ``too_few_frames`` of a video.
    """
    choice = _chosen(timeline, part, settings, name)
    last = len(timeline.seconds) - 1
    if settings.last_frame == "always" and choice.indices[-1] != last:
        raise SampleError(
            "bad_clip",
            f"the last frame that is to be shown of video '{name}' is at {timeline.seconds[choice.indices[-1]]:g} s, "
            f"its last one at {timeline.seconds[last]:g} s. With media.last_frame=always that one must be shown. "
            "Correct the record's clip or moments, or set media.last_frame=as_sampled.",
        )
    return choice


def _chosen(timeline: Timeline, part: Part, settings: MediaSettings, name: str) -> Choice:
    if part.times:
        return moments(timeline, part.times, name)
    if settings.num_frames is None and (ends := held_ends(timeline, part)):
        return moments(timeline, ends, name)
    span = span_of(timeline, part, name)
    if settings.num_frames is not None:
        count = ask(sampling.num_uniform_frames, span.total, settings.num_frames)
    else:
        bounds = settings.min_frames, settings.max_frames
        count = ask(sampling.num_sampled_frames, span.total, span.fps, settings.fps, *bounds)
    return spread(span, count)


def spread(span: Span, count: int) -> Choice:
    """``count`` frames from the first to the last of a span."""
    indices = tuple(sampling.frame_indices(span.total, count, span.first))
    return Choice(indices, sampling.sampled_fps(count, span.total, span.fps), span)


def held_ends(timeline: Timeline, part: Part) -> tuple[float, float] | None:
    """Both ends of a clip of the last picture where that is held (slides, credits) and at most itself begins in it.

    All that such a clip shows are the pictures on display at its ends. Held means twice as long as usual, or longer.
    """
    seconds, late = timeline.seconds, timeline.tolerance + _FLOAT_SECONDS
    if timeline.shown_until < seconds[-1] + 2 / timeline.fps or len(seconds) < sampling.FRAME_MULTIPLE:
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
    if total < sampling.FRAME_MULTIPLE or (part.start is None and part.end is None):
        return Span(0, total, timeline.fps)
    start, end = part.start or 0.0, timeline.end if part.end is None else part.end
    is_constant = timeline.has_constant_rate()
    if is_constant:
        first, last = ask(sampling.clip_range, total, timeline.fps, part.start, part.end) or (0, -1)
    else:
        first = bisect_left(seconds, start - timeline.tolerance)
        last = bisect_right(seconds, end + timeline.tolerance) - 1
    if last - first + 1 < sampling.FRAME_MULTIPLE:
        raise SampleError(
            "bad_clip",
            f"the clip from {start:g} s to {end:g} s holds fewer than {sampling.FRAME_MULTIPLE} frames of video "
            f"'{name}', which has {total} in {timeline.end:.2f} s. At least {sampling.FRAME_MULTIPLE} are needed. "
            "Correct its start or end, or remove the record.",
        )
    fps = timeline.fps if is_constant else sampling.average_fps(seconds[first : last + 1], timeline.stated_fps)
    return Span(first, last - first + 1, fps)


def moments(timeline: Timeline, times: Sequence[float], name: str) -> Choice:
    """The frame on display at each moment. Of an odd number the last one comes twice, as in qwen-vl-utils.

    ``sampled_fps`` is the mean rate of the moments, 2 / s for 0, 0.1 and 1 s: models that are told no times count
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
    places = [bisect_right(timeline.seconds, time + late) - 1 for time in times]
    places += places[-1:] * (-len(places) % sampling.FRAME_MULTIPLE)
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else timeline.fps
    return Choice(tuple(places), rate)

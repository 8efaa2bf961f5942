"""Is the whole video there? What the header states against what the file holds."""

from __future__ import annotations

from vlm_pg.media.container import VideoHeader
from vlm_pg.media.index import VideoIndex


def missing(header: VideoHeader, index: VideoIndex) -> tuple[float, float]:
    """How many seconds the header states, and how many of them are there; equal where nothing is missing.

    The video is compared with what is stated of the video; where only the whole file's length is stated, all streams
    are, because sound may go on when the picture has ended. What states no length (MPEG-TS, MPEG-PS) counts as whole.
    """
    video = _there(header.video_seconds, index.video_reach)
    whole = _there(header.duration_seconds, index.reach)
    return min(video, whole, key=lambda pair: pair[1] / pair[0] if pair[0] > 0 else 1.0)


def _there(stated_seconds: float, reach: tuple[float, float]) -> tuple[float, float]:
    """``stated_seconds`` is a length, or (Matroska) an end: then what lies before the first packet is no part of it."""
    start, end = reach
    length = stated_seconds - start if 0 < start < stated_seconds else stated_seconds
    return length, min(length, end - start)

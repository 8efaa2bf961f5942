"""Limits of videos that show before anything is decoded: the area of a frame, its shape, the length of the whole."""

from __future__ import annotations

from vlm_pg.errors import SampleError
from vlm_pg.media import sampling
from vlm_pg.media.settings import MediaSettings


def check_frame_size(name: str, width: int, height: int, settings: MediaSettings) -> None:
    """Refuse by what is stated of a frame's size; 0 stands for "not stated".

    Raises:
        SampleError: ``video_too_large``, ``bad_aspect_ratio``.
    """
    if width * height > settings.max_video_frame_pixels:
        raise too_large(name, f"it has frames of {width}x{height} pixels", settings)
    if width and height:
        sampling.check_aspect_ratio(height, width)


def check_length(name: str, seconds: float, settings: MediaSettings) -> None:
    """Raises SampleError ``video_too_long``."""
    if seconds > settings.max_video_seconds:
        raise SampleError(
            "video_too_long",
            f"video '{name}' lasts {seconds:.0f} s. At most {settings.max_video_seconds:.0f} s are allowed. Cut "
            "the file, or raise media.max_video_seconds.",
        )


def too_large(name: str, cause: str, settings: MediaSettings) -> SampleError:
    """``video_too_large``, and what to do."""
    return SampleError(
        "video_too_large",
        f"video '{name}' is too large: {cause}. At most {settings.max_video_frame_pixels} pixels are allowed. Scale "
        "the file down, or raise media.max_video_frame_pixels.",
    )

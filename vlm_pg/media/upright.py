"""Decoded frames as pictures: turned and mirrored as their file asks, on white where they are transparent.

Sources: ISO/IEC 14496-12 8.3.2 (the matrix of a track); FFmpeg's libavutil/display.h (how it is handed on).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import open_video
from vlm_pg.media.images import on_white

# matrices are of rounded numbers; players take what is as near as this for a quarter turn
_NEAR = math.tan(math.radians(1))
# Times at which a file is searched for opaque pixels if the requested frames have none, and frames at each.
_PROBES, _FRAMES = 32, 16


@dataclass(frozen=True)
class Turn:
    """How a stored picture is made upright: rows and columns exchanged, then left and right, then top and bottom."""

    exchange: bool = False
    left_right: bool = False
    top_bottom: bool = False

    @property
    def mirrors(self) -> bool:
        """Whether the picture is another one than after any rotation."""
        return self.exchange ^ self.left_right ^ self.top_bottom

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """The upright picture of [height, width, channels]."""
        if self.exchange:
            pixels = pixels.swapaxes(0, 1)
        if self.left_right:
            pixels = pixels[:, ::-1]
        if self.top_bottom:
            pixels = pixels[::-1]
        return np.ascontiguousarray(pixels)


def turn_of(frame: Any, near: float = _NEAR) -> Turn:
    """What a frame's display matrix asks for; ``near``: by how much of its side a picture may lean.

    Raises:
        DecodeFailure: it is neither quarter turns nor mirroring.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return Turn()
    # x' = a x + c y, y' = b x + d y, with x to the right and y downwards
    a, b, _, c, d = (int(number) for number in np.frombuffer(bytes(matrix), np.int32)[:5])
    if (abs(b) <= near * abs(a) and abs(c) <= near * abs(d)) or not (a or b or c or d):
        return Turn(False, a < 0, d < 0)
    if abs(a) <= near * abs(b) and abs(d) <= near * abs(c):
        return Turn(True, c < 0, b < 0)
    degrees = math.degrees(math.atan2(b, a))
    raise DecodeFailure(
        f"its pictures are to be turned by {degrees:.3g} degrees or skewed. Quarter turns and mirroring are shown"
    )


def has_alpha(frame: Any) -> bool:
    """Whether the frame's format says how opaque each pixel is."""
    return any(component.is_alpha for component in frame.format.components)


class Opacity:
    """Whether a video file uses its alpha channel: formats with one are used without, too.

    It does where a requested frame, or one of some that lie evenly over the file, has a pixel that is not wholly
    transparent. So a video that fades in from nothing begins with white, whichever of its frames are requested.

    ``max_pixels``: as in ``open_video``.
    """

    def __init__(self, path: Path, max_pixels: int = 0):
        self._path, self._max_pixels = path, max_pixels
        self._is_used: bool | None = None

    def is_used(self, alpha: np.ndarray) -> bool:
        """``alpha``: of a requested frame, 0 for fully transparent. If it has no other value, the file is searched."""
        if self._is_used is None:
            self._is_used = bool(alpha.any()) or self._is_used_somewhere()
        return self._is_used

    def _is_used_somewhere(self) -> bool:
        """A bounded search, however long the file is; damage found there is ignored, as these frames are not shown."""
        import av
        from av.video.reformatter import VideoReformatter

        scaler = VideoReformatter()
        with open_video(self._path, self._max_pixels) as (container, stream):
            for pts in _probe_times(stream):
                try:
                    container.seek(pts, stream=stream)
                    for frame in islice(container.decode(stream), _FRAMES):
                        if has_alpha(frame) and _rgba(frame, scaler)[..., 3].any():
                            return True
                        if frame.pts is None or frame.pts >= pts:
                            break
                except av.FFmpegError:
                    continue
        return False


def _probe_times(stream: Any) -> list[int]:
    """Timestamps, evenly over the stream, its end among them; the beginning alone where its length is not known."""
    start, duration = stream.start_time or 0, stream.duration
    if duration is None and stream.container.duration is not None:
        duration = int(stream.container.duration / 1_000_000 / stream.time_base)
    return [start + (duration or 0) * number // _PROBES for number in range(_PROBES + 1 if duration else 1)]


def upright(frame: Any, like: np.ndarray | None, scaler: Any, opacity: Opacity) -> np.ndarray:
    """The frame as uint8 [height, width, 3], in the size of ``like`` if given.

    Transparent parts are white, as they are in images. Frames of a file that is nowhere opaque are shown as stored.

    Args:
        like: an upright picture; streams may change size midway, and the reader of the frames expects one size.
        scaler: FFmpeg's, one for all frames; making one takes longer than a small picture.

    Raises:
        DecodeFailure: see ``turn_of``.
    """
    turn = turn_of(frame)
    size: dict[str, int] = {}
    if like is not None:
        height, width = like.shape[1::-1] if turn.exchange else like.shape[:2]
        size = {"height": height, "width": width}
    if not has_alpha(frame):
        return turn.apply(scaler.reformat(frame, format="rgb24", threads=1, **size).to_ndarray())
    pixels = _rgba(frame, scaler, **size)
    is_used = opacity.is_used(pixels[..., 3])
    return turn.apply(np.asarray(on_white(Image.fromarray(pixels))) if is_used else pixels[..., :3])


def _rgba(frame: Any, scaler: Any, **size: int) -> np.ndarray:
    """uint8 [height, width, 4]."""
    return np.asarray(scaler.reformat(frame, format="rgba", threads=1, **size).to_ndarray())


def check_shown_as_stored(path: Path, decoder: str) -> Turn:
    """How the pictures of a file are to be turned, for a decoder that knows of rotation only.

    Raises:
        DecodeFailure: they are to be mirrored, or may be transparent.
    """
    with open_video(path) as (container, stream), reading(()):
        frame = next(container.decode(stream))
    turn = turn_of(frame, near=0.0)
    if turn.mirrors:
        raise DecodeFailure(f"{decoder} does not mirror pictures as this file asks")
    if has_alpha(frame):
        raise DecodeFailure(f"{decoder} shows what lies under transparent parts, which are white")
    return turn

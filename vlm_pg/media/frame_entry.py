"""Decoded media as entries of the cache, and back: an entry is believed as far as it can be what was asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vlm_pg.cache.store import Damaged, Entry
from vlm_pg.media.sampling import MAX_ASPECT_RATIO
from vlm_pg.media.selection import Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import Cue, DecodedMedia, MediaKind


def most_frame_bytes(kind: MediaKind, settings: MediaSettings, factor: int, part: Part) -> int:
    """More bytes than any medium's frames can have that is read so."""
    count = 1 if kind == "image" else max(settings.most_frames, len(part.times))
    wanted = settings.image_max_pixels if kind == "image" else settings.max_pixels
    # A frame that is narrow beyond measure has one factor for a side. Sides are rounded, none to its double.
    return 4 * 3 * count * max(wanted, MAX_ASPECT_RATIO * factor * factor)


def most_entry_bytes(frame_bytes: int) -> int:
    """More than frames of so many bytes and their subtitles take in an entry."""
    return frame_bytes + frame_bytes // 64 + (32 << 20)


def entry_of(media: DecodedMedia) -> Entry:
    """A medium as an entry."""
    about = {
        "kind": media.kind,
        "shape": list(media.frames.shape),
        "frame_seconds": list(media.frame_seconds),
        "sampled_fps": media.sampled_fps,
        "decoder": media.decoder,
        "subtitles": [asdict(cue) for cue in media.subtitles],
    }
    return Entry({"packed": packed(media.frames)}, about)


def media_of(entry: Entry, kind: MediaKind, factor: int, most_bytes: int) -> DecodedMedia:
    """The medium of an entry.

    Args:
        entry: of ``entry_of``.
        kind, factor: what was asked for.
        most_bytes: of its frames.

    Raises:
        Damaged: it describes no medium of this kind, or a larger one, or its frames do not unpack.
    """
    try:
        about = entry.about
        shape, seconds = about["shape"], about["frame_seconds"]
        cues = tuple(Cue(**cue) for cue in about["subtitles"])
        numbers = [*seconds, about["sampled_fps"], *(time for cue in cues for time in (cue.start, cue.end))]
        right = (
            about["kind"] == kind
            and _is_shape(shape, factor, most_bytes)
            and len(seconds) == shape[0]
            and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
            and all(isinstance(text, str) for text in (about["decoder"], *(cue.text for cue in cues)))
        )
        if not right:
            raise Damaged("it describes no such medium")
        frames = unpacked(entry.tensors["packed"], shape)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise Damaged(str(error)) from error
    return DecodedMedia(kind, frames, tuple(seconds), about["sampled_fps"], about["decoder"], cues)


def _is_shape(shape: Any, factor: int, most_bytes: int) -> bool:
    """Whether it is [F, 3, height, width] of frames that the tower takes."""
    if not isinstance(shape, list) or len(shape) != 4 or not all(type(side) is int and side > 0 for side in shape):
        return False
    return shape[1] == 3 and not shape[2] % factor and not shape[3] % factor and math.prod(shape) <= most_bytes


def packed(frames: np.ndarray) -> np.ndarray:
    """Frames [F, 3, height, width] without loss in about half of their bytes: uint8 [N].

    Colours are alike and so are neighbouring rows, so green and blue are stored as differences from red, then each
    row as one from the row above, and what is left is packed by Zstandard.
    """
    import pyarrow

    left = frames.copy()
    left[:, 1:] -= frames[:, :1]
    left[:, :, 1:] -= left[:, :, :-1].copy()
    return np.frombuffer(pyarrow.compress(left.tobytes(), codec="zstd", asbytes=True), dtype=np.uint8)


def unpacked(content: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The frames of ``packed``.

    Raises:
        OSError: it unpacks to more or fewer bytes, or to none.
    """
    import pyarrow

    size = math.prod(shape)
    whole = pyarrow.decompress(content.tobytes(), decompressed_size=size, codec="zstd", asbytes=True)
    frames = np.frombuffer(whole, dtype=np.uint8).reshape(shape)
    frames = np.add.accumulate(frames, axis=2, dtype=np.uint8)
    frames[:, 1:] += frames[:, :1]
    return frames

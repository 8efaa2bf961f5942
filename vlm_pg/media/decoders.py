"""Reading chosen frames of a video file: one interface, decord and PyAV behind it.

Both decoders read the same stream, take positions in the same index of frames in presentation order, and return upright
pictures. Everything here may hang or crash on a damaged file, so it is meant to run in a worker process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vlm_pg.media.container import DecodeFailure, VideoIndex, open_video


class Decoder(Protocol):
    """An open video."""

    name: str

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Frames ``indices`` (ascending positions in the index), upright: uint8 [F, height, width, 3].

        Raises:
            DecodeFailure: the decoder cannot deliver exactly these frames.
        """
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class DecordDecoder:
    """decord: fast random access; a wheel of 2021 that does not know AV1. Applies rotation itself.

    Raises DecodeFailure also for files of which it would return wrong frames: it seeks by the stored place of key
    frames, so where stored and shown places differ it is off by one or more frames without saying so.
    """

    name = "decord"

    def __init__(self, path: Path, index: VideoIndex):
        import decord

        decord.logging.set_level(decord.logging.QUIET)
        self._errors = (decord.DECORDError, RuntimeError)
        if not index.key_places_agree:
            raise DecodeFailure("open", "key frames are stored out of order, where decord misplaces frames")
        try:
            self._reader = decord.VideoReader(str(path), num_threads=1)
            count = len(self._reader)
        except self._errors as error:
            raise DecodeFailure("open", _sentence(error)) from error
        if count != len(index.pts):
            raise DecodeFailure("open", f"decord counts {count} frames where {len(index.pts)} are shown")

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``."""
        try:
            return self._reader.get_batch(list(indices)).asnumpy()
        except self._errors as error:
            raise DecodeFailure("decode", _sentence(error)) from error

    def close(self) -> None:
        """Free the reader's buffers."""
        del self._reader


def _sentence(error: BaseException) -> str:
    """The sentence of a decord error, without its stack of C++ frames and the place in its sources."""
    lines = str(error).strip().splitlines()
    return lines[0].split("Check failed:")[-1].strip() if lines else type(error).__name__


class PyAVDecoder:
    """PyAV: every codec of a current FFmpeg. Decodes forward from the key frame before each wanted frame."""

    name = "pyav"

    def __init__(self, path: Path, index: VideoIndex):
        self._path, self._index = path, index

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``."""
        import av

        wanted = [self._index.pts[index] for index in indices]
        pictures: dict[int, np.ndarray] = {}
        container, stream = open_video(self._path)
        try:
            with container:
                # one run of decoding for all wanted frames that follow the same key frame
                for key, group in groupby(wanted, key=lambda pts: bisect_right(self._index.key_pts, pts) - 1):
                    self._read_run(container, stream, key, sorted(set(group)), pictures)
        except av.FFmpegError as error:
            raise DecodeFailure("decode", str(error)) from error
        return np.stack([pictures[pts] for pts in wanted])

    def _read_run(
        self, container: Any, stream: Any, key: int, wanted: Sequence[int], pictures: dict[int, np.ndarray]
    ) -> None:
        """Decode forward from key frame number ``key`` (-1: from the start) and keep the ``wanted`` frames."""
        first = self._index.pts[0]
        for start in (self._index.key_pts[key], first) if key >= 0 else (first,):
            container.seek(start, stream=stream, backward=True)
            if _keep_wanted(container.decode(stream), wanted, pictures):
                return
            # The seek went past the first wanted frame, as sparse indexes may: decode again from the start.
        missing = next(pts for pts in wanted if pts not in pictures)
        raise DecodeFailure("decode", f"no frame comes at {float(missing * self._index.time_base):.3f} s")

    def close(self) -> None:
        """Nothing stays open between reads."""


def _keep_wanted(frames: Iterable[Any], wanted: Sequence[int], pictures: dict[int, np.ndarray]) -> bool:
    """Put the wanted frames into ``pictures``; False as soon as one of them cannot come any more."""
    left = [pts for pts in wanted if pts not in pictures]
    if not left:
        return True
    for frame in frames:
        if frame.pts is None or frame.pts < left[0]:
            continue
        if frame.pts > left[0]:
            return False
        if frame.is_corrupt:
            raise DecodeFailure("decode", f"the frame at {frame.time:.3f} s is damaged")
        pictures[left.pop(0)] = _upright(frame, next(iter(pictures.values()), None))
        if not left:
            return True
    return False


def _upright(frame: Any, like: np.ndarray | None) -> np.ndarray:
    """The frame as uint8 [height, width, 3], turned as its metadata ask, in the size of ``like`` if given."""
    turns = round(frame.rotation / 90) % 4
    size: dict[str, int] = {}
    if like is not None:  # streams may change size midway; the reader of the frames expects one size
        height, width = like.shape[:2] if turns % 2 == 0 else like.shape[1::-1]
        size = {"height": height, "width": width}
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24", **size), turns))

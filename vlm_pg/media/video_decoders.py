"""Reading chosen frames of a video file: the interface of decoders, and decord and torchcodec behind it.

All decoders, PyAV's too (``seeking.py``), read the same stream, take positions in the same index of frames in
presentation order, and return upright pictures. They may hang or crash on a damaged file, so they run in workers.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vlm_pg.errors import ConfigError
from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import judge
from vlm_pg.media.index import VideoIndex
from vlm_pg.media.upright import Turn, check_shown_as_stored

# In others decord seeks elsewhere without saying so.
DECORD_CONTAINERS = ("mov", "matroska")


class Decoder(Protocol):
    """An open video."""

    name: str

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Frames ``indices`` (ascending positions in the index), upright: uint8 [F, height, width, 3].

        Raises:
            DecodeFailure: the decoder cannot deliver exactly these frames.
        """
        ...


class DecordDecoder:
    """decord: a wheel of 2021 that does not know AV1. Used only where media.decoder names it.

    It counts frames from the nearest flagged key frame and checks nothing, so files that it is known to read wrongly
    are refused: containers other than MP4, QuickTime, Matroska and WebM; key frames stored out of order, or flagged and
    none (no sync table, intra-refresh); times that do not name frames; rotation in Matroska; mirroring; transparency;
    another number of frames. In damaged files it may return garbage or neighbouring frames without a word.
    """

    name = "decord"

    def __init__(self, path: Path, index: VideoIndex):
        import decord

        decord.logging.set_level(decord.logging.QUIET)
        self._errors = (decord.DECORDError, RuntimeError)
        container_format = judge(path)
        if container_format not in DECORD_CONTAINERS:
            raise DecodeFailure(f"decord misplaces frames in '{container_format}' containers")
        index.check_times_name_frames(self.name)
        if not index.key_positions_agree:
            raise DecodeFailure("key frames are out of order or none, where decord misplaces frames")
        if check_shown_as_stored(path, self.name) != Turn() and container_format == "matroska":
            raise DecodeFailure("decord does not apply the rotation that Matroska files state")
        with reading(self._errors, _sentence):
            self._reader = decord.VideoReader(str(path), num_threads=1)
            count, keys = len(self._reader), [int(key) for key in self._reader.get_key_indices()]
        if count != len(index.pts):
            raise DecodeFailure(f"decord counts {count} frames where {len(index.pts)} are shown")
        if keys != [bisect_left(index.pts, entry.pts) for entry in index.entries]:
            raise DecodeFailure("decord takes other frames for key frames, and would misplace those behind them")

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``."""
        with reading(self._errors, _sentence):
            return self._reader.get_batch(list(indices)).asnumpy()


def _sentence(error: BaseException) -> str:
    """The sentence of a decord error, without its stack of C++ frames and source location."""
    lines = str(error).strip().splitlines()
    return lines[0].split("Check failed:")[-1].strip() if lines else type(error).__name__


_NOT_HERE = (
    "media.decoder is torchcodec, which {0}. auto, decord and pyav are allowed too. Install it with pip install "
    "'vlm-pg[torchcodec]', and the shared libraries of FFmpeg 4 to 9 where the loader finds them, or set "
    "media.decoder=auto."
)


def check_installed(device: str = "cpu") -> None:
    """Raise ConfigError where torchcodec, an FFmpeg that it can load, or the device is missing."""
    try:
        import torchcodec.decoders  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(_NOT_HERE.format("is not installed")) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(_NOT_HERE.format("finds no FFmpeg that it can load")) from error
    # Counted without starting CUDA in this process, whose workers are to start it themselves.
    if device == "cuda" and not torch.cuda.device_count():
        raise ConfigError(
            "media.decoder_device is cuda, and there is no GPU that torch can use. cpu is allowed too. Leave it out."
        )


class TorchCodecDecoder:
    """torchcodec in its exact mode: it reads all packets first and then knows frames by their times.

    It believes flagged key frames and shows patched pictures. So files that it is known to read wrongly are refused:
    flagged key frames that are none, times that do not name frames, mirroring, transparency, another number of frames
    than our index has. Every frame that comes is compared with our index by its time. In damaged files it may return
    garbage without a word.

    ``device``: cpu or cuda, which is the GPU of this process's rank; frames come from there to the CPU.
    """

    name = "torchcodec"

    def __init__(self, path: Path, index: VideoIndex, device: str = "cpu"):
        judge(path)
        index.check_times_name_frames(self.name)
        check_shown_as_stored(path, self.name)
        if not index.flags_are_entries:
            raise DecodeFailure("it flags key frames that are none, behind which torchcodec shows garbage")
        from torchcodec.decoders import VideoDecoder

        device = f"cuda:{gpu_number()}" if device == "cuda" else device
        with reading((RuntimeError, ValueError), _first_line):
            self._decoder = VideoDecoder(
                str(path), dimension_order="NHWC", num_ffmpeg_threads=1, device=device, seek_mode="exact"
            )
        if len(self._decoder) != len(index.pts):
            raise DecodeFailure(f"torchcodec counts {len(self._decoder)} frames where {len(index.pts)} are shown")
        self._seconds = index.pts_seconds
        self._tick = float(index.time_base)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``."""
        with reading((RuntimeError, ValueError, IndexError), _first_line):
            batch = self._decoder.get_frames_at(list(indices))
        for index, second in zip(indices, batch.pts_seconds.tolist(), strict=True):
            if abs(second - self._seconds[index]) > self._tick / 2:
                raise DecodeFailure(
                    f"torchcodec has a frame of {second:.3f} s where {self._seconds[index]:.3f} s are wanted"
                )
        frames: np.ndarray = batch.data.cpu().numpy()
        return frames


def ffmpeg_versions() -> Mapping[str, Any]:
    """Of the libraries of FFmpeg that torchcodec has loaded; its own version says nothing about them."""
    from torchcodec._core import get_ffmpeg_library_versions

    versions: Mapping[str, Any] = get_ffmpeg_library_versions()
    return versions


@cache
def gpu_number() -> int:
    """The GPU of this process's rank. One that does not start here is no fault of the file: its error goes through."""
    number = int(os.environ.get("LOCAL_RANK", 0))
    torch.zeros(1, device=f"cuda:{number}")
    return number


def _first_line(error: BaseException) -> str:
    """The first line of an error, without its source location."""
    lines = str(error).strip().splitlines()
    return lines[0].split(": ", 1)[-1] if lines else type(error).__name__

"""torchcodec behind the interface of decoders: FFmpeg of the system, frames that are known by their times."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlm_pg.errors import ConfigError
from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import judge
from vlm_pg.media.index import VideoIndex
from vlm_pg.media.upright import check_shown_as_stored

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

    It believes flagged key frames and shows what a decoder has patched. So what it is known to get wrong is refused:
    flagged key frames that are none, times that do not name frames, mirroring, transparency, another number of frames
    than our index has. Every frame that comes is compared with our index by its time. In damaged files it may return
    garbage without a word.

    Args:
        path: the file.
        index: its frames.
        device: cpu or cuda, which is the GPU of this process's rank; frames come from there to the CPU.
    """

    name = "torchcodec"

    def __init__(self, path: Path, index: VideoIndex, device: str = "cpu"):
        judge(path)
        index.check_times_name_frames(self.name)
        check_shown_as_stored(path, self.name)
        if not index.flags_are_entries:
            raise DecodeFailure("open", "it flags key frames that are none, behind which torchcodec shows garbage")
        from torchcodec.decoders import VideoDecoder

        if device == "cuda":
            device = f"cuda:{gpu_number()}"
        with reading("open", (RuntimeError, ValueError), _sentence):
            self._decoder = VideoDecoder(
                str(path), dimension_order="NHWC", num_ffmpeg_threads=1, device=device, seek_mode="exact"
            )
        if len(self._decoder) != len(index.pts):
            raise DecodeFailure(
                "open", f"torchcodec counts {len(self._decoder)} frames where {len(index.pts)} are shown"
            )
        self._seconds = index.pts_seconds
        self._tick = float(index.time_base)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``."""
        with reading("decode", (RuntimeError, ValueError, IndexError), _sentence):
            batch = self._decoder.get_frames_at(list(indices))
        for place, second in zip(indices, batch.pts_seconds.tolist(), strict=True):
            if abs(second - self._seconds[place]) > self._tick / 2:
                raise DecodeFailure(
                    "decode", f"torchcodec has a frame of {second:.3f} s where {self._seconds[place]:.3f} s are wanted"
                )
        frames: np.ndarray = batch.data.cpu().numpy()
        return frames

    def close(self) -> None:
        """Free the decoder."""
        del self._decoder


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


def _sentence(error: BaseException) -> str:
    """The first line of an error, without the place in torchcodec's sources."""
    lines = str(error).strip().splitlines()
    return lines[0].split(": ", 1)[-1] if lines else type(error).__name__

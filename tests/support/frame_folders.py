"""Folders of numbered pictures, and the same pictures as a video file."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.clips import picture
from tests.support.odd_clips import encode


def coloured(number: int) -> np.ndarray:
    """A picture that shows its number, with colours that differ from pixel to pixel: uint8 [64, 96, 3]."""
    noise = np.random.default_rng(number).integers(0, 40, (64, 96, 3), dtype=np.uint8)
    return np.where(picture(number) > 127, 255 - noise, noise).astype(np.uint8)


def write_folder(folder: Path, pictures: Sequence[np.ndarray], name: str = "{:05}.png", first: int = 1) -> Path:
    """Pictures as files ``first``, ``first`` + 1, ... of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(pictures, first):
        Image.fromarray(pixels).save(folder / name.format(number), quality=95)
    return folder


def write_video(path: Path, pictures: Sequence[np.ndarray], fps: Fraction, codec: str, pix_fmt: str) -> Path:
    """The same as a file, by FFmpeg, with a clock of one tick a frame where the container allows it."""
    return encode(path, range(len(pictures)), codec, clock=fps, pictures=pictures, pix_fmt=pix_fmt, rate=fps)

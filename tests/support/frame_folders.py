"""Folders of numbered pictures, and the same pictures as a video file."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.clips import picture


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
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for number, pixels in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pix_fmt)
            frame.pts, frame.time_base = number, 1 / fps
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path

"""Videos and pictures of a few hundred bytes, as many of different content as a test wants."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np


@cache
def _mp4(seconds: int, rate: int, height: int, width: int) -> bytes:
    import av

    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(seconds * rate):
            pixels = np.full((height, width, 3), 4 * number % 256, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


def mp4(number: int = 0, seconds: int = 30, rate: int = 2, height: int = 48, width: int = 64) -> bytes:
    """A video of its own content for each number: the same frames behind each other, and a box that readers skip."""
    return _mp4(seconds, rate, height, width) + (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big")


def png(number: int = 0) -> bytes:
    """A picture of its own for each number below 2**24."""
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (32, 32), (number & 255, number >> 8 & 255, number >> 16 & 255)).save(content, "PNG")
    return content.getvalue()


def write_media(path: Path, number: int = 0, seconds: int = 30) -> None:
    """A video or picture at a path, by its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(number) if path.suffix in (".png", ".jpg", ".jpeg") else mp4(number, seconds))

"""The frames of questions as small JPEGs inside the page, each once, up to a size in all."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_pg.observe.report.markup import number_or_none
from vlm_pg.observe.text import visible

HEIGHT, WIDTH = 120, 320  # of a thumbnail at most, in pixels
_KEPT_BYTES = 8_000  # a JPEG up to this size is taken as it is
_MAX_SOURCE_BYTES = 20_000_000
_QUALITY = 60
_CHUNK_CHARACTERS = 1_000_000


class FramePool:
    """Collects thumbnails; ``chunks`` are JSON lists of them in base64, which the page decodes when they are shown.

    Args:
        folder: the results folder; no picture outside of it is read.
    """

    def __init__(self, folder: Path):
        self._folder = folder.resolve()
        self._places: dict[bytes, tuple[int, int] | str] = {}
        self._chunks: list[list[str]] = [[]]
        self._in_chunk = 0
        self.size = 0

    def chunks(self) -> list[str]:
        """Each as it stands in the page."""
        return [json.dumps(chunk, separators=(",", ":")) for chunk in self._chunks if chunk]

    def add(self, shown: dict[str, Any], most: int, room: int) -> dict[str, Any] | None:
        """Take a question's frames, at most ``most`` of them, evenly spaced.

        Returns:
            ``{"at": [[chunk, place], ...], "seconds": [...], "why": "..."}``: where they are, the time of each (None if
            unknown), and what is amiss with those that could not be used ("" where nothing is). None if taking them
            would make the pool larger than ``room`` characters; then none of them is taken.
        """
        frames = shown.get("frames")
        frames = frames if isinstance(frames, list) else []
        times = shown.get("seconds")
        times = times if isinstance(times, list) and len(times) == len(frames) else [None] * len(frames)
        count = min(len(frames), most)
        chosen = [index * (len(frames) - 1) // max(1, count - 1) for index in range(count)]
        keys = [hashlib.sha256(str(frames[index]).encode("utf-8", "replace")).digest() for index in chosen]
        unknown = {key: frames[index] for key, index in zip(keys, chosen, strict=True) if key not in self._places}
        if unknown and self.size >= room:
            return None
        new: dict[bytes, str] = {}
        faults: dict[bytes, str] = {}
        for key, frame in unknown.items():
            try:
                new[key] = base64.b64encode(small_jpeg(self._bytes_of(frame))).decode("ascii")
            except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError) as error:
                faults[key] = visible(str(error))[:300]
        if new and self.size + sum(map(len, new.values())) > room:
            return None
        self._places.update({key: self._place(picture) for key, picture in new.items()})
        self._places.update(faults)
        found = [(self._places[key], number_or_none(times[index])) for key, index in zip(keys, chosen, strict=True)]
        return {
            "at": [place for place, _ in found if not isinstance(place, str)],
            "seconds": [seconds for place, seconds in found if not isinstance(place, str)],
            "why": next((place for place, _ in found if isinstance(place, str)), ""),
        }

    def _place(self, picture: str) -> tuple[int, int]:
        if self._in_chunk + len(picture) > _CHUNK_CHARACTERS and self._chunks[-1]:
            self._chunks.append([])
            self._in_chunk = 0
        self._chunks[-1].append(picture)
        self._in_chunk += len(picture)
        self.size += len(picture)
        return len(self._chunks) - 1, len(self._chunks[-1]) - 1

    def _bytes_of(self, source: object) -> bytes:
        """What a data URI or a path inside the folder holds. Raises ValueError, OSError."""
        if not isinstance(source, str):
            raise ValueError("a frame is neither a data URI nor a path")
        if source.startswith("data:"):
            head, _, data = source.partition(",")
            if not head.startswith("data:image/") or not head.endswith(";base64") or len(data) > _MAX_SOURCE_BYTES:
                raise ValueError("a frame's data URI is no picture in base64, or is too large")
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise ValueError(f"a frame's data URI is damaged: {error}") from error
        path = (self._folder / source).resolve()
        if self._folder not in path.parents:
            raise ValueError(f"the picture {source} lies outside the results folder")
        if not path.is_file():
            raise ValueError(f"the picture {source} is not there")
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            raise ValueError(f"the picture {source} is larger than {_MAX_SOURCE_BYTES:,} bytes")
        return path.read_bytes()


def small_jpeg(data: bytes) -> bytes:
    """A picture as a JPEG of a few kilobytes; a JPEG that is small already stays as it is.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: it is no picture that can be read.
    """
    if len(data) <= _KEPT_BYTES and data.startswith(b"\xff\xd8\xff"):
        return data
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
        image.draft("RGB", (2 * WIDTH, 2 * HEIGHT))
        small = image.convert("RGB")
    small.thumbnail((WIDTH, HEIGHT))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=_QUALITY, optimize=True)
    return target.getvalue()

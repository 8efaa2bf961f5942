"""What the boxes of an MP4 or QuickTime file promise, read without building tables: how many frames, in which units.

A few bytes of a sample table can promise billions of samples, and FFmpeg makes room for each of them when it opens the
file. A sample of video has bytes of its own; sound in old QuickTime files has up to six samples to a byte.

Where a video track lacks the units of its times FFmpeg takes others, so that every time is off by a factor: see
``mp4_clock.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.mp4_clock import Clock

_INSIDE = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"mvex", b"moof", b"traf"}
MAX_BOXES = 1_000_000
SAMPLES_PER_BYTE = 8
# tables of entries that each begin with a count of samples: bytes of an entry
_COUNTED = {b"stts": 8, b"ctts": 8}
_CHUNK_ENTRIES = 4096


def check_tables(file: BinaryIO, size_bytes: int) -> None:
    """Refuse tables that promise more samples than a file of this size can hold, and times in unknown units.

    Raises:
        DecodeFailure: they do, or hide in a compressed header.
    """
    fragments, clock = 0, Clock()
    for kind, start, end in _boxes(file, 0, size_bytes):
        if kind == b"cmov":
            raise DecodeFailure("open", "its header is compressed, which is not read")
        clock.read(file, kind, start, end)
        count = _promised(file, kind, start, end)
        if kind == b"trun":
            fragments += count
            count = fragments
        if count > SAMPLES_PER_BYTE * size_bytes:
            raise DecodeFailure("open", f"its tables promise {count} samples in a file of {size_bytes} bytes")
    clock.check()


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """All boxes that can hold tables, in their order, with the bounds of their contents."""
    stack = [(start, end)]
    seen = 0
    while stack:
        start, end = stack.pop()
        if end - start < 8:
            continue
        file.seek(start)
        head = file.read(16)
        if len(head) < 8:
            continue
        size, kind, begins = int.from_bytes(head[:4], "big"), head[4:8], start + 8
        if size == 1 and len(head) == 16:
            size, begins = int.from_bytes(head[8:16], "big"), start + 16
        stop = end if size == 0 else start + size
        if stop < begins:  # FFmpeg stops reading here as well
            continue
        seen += 1
        if seen > MAX_BOXES:
            raise DecodeFailure("open", f"it has more than {MAX_BOXES} boxes")
        stack.append((stop, end))
        if kind in _INSIDE:
            stack.append((begins, min(stop, end)))
        yield kind, begins, min(stop, end)


def _promised(file: BinaryIO, kind: bytes, start: int, end: int) -> int:
    """The number of samples that one box promises; 0 for boxes that promise none."""
    if kind in (b"stsz", b"stz2"):  # version and flags, size of every sample, number
        return _number(file, start + 8)
    if kind == b"trun":  # version and flags, number
        return _number(file, start + 4)
    if kind not in _COUNTED:
        return 0
    width = _COUNTED[kind]
    left = min(_number(file, start + 4), max(0, end - start - 8) // width)
    file.seek(start + 8)
    total = 0
    while left:
        data = file.read(min(left, _CHUNK_ENTRIES) * width)
        whole = len(data) // width
        if not whole:
            break
        total += sum(count for count, _ in struct.iter_unpack(">II", data[: whole * width]))
        left -= whole
    return total


def _number(file: BinaryIO, place: int) -> int:
    file.seek(place)
    return int.from_bytes(file.read(4), "big")

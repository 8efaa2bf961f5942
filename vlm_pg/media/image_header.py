"""What image files say about themselves, read before Pillow gives memory or time to them.

Pillow makes room for a whole WebP when it opens the file, and goes through a JPEG once for every scan it has.
Sources: RFC 9649 (WebP), ITU-T T.81 B.1.1 (JPEG).
"""

from __future__ import annotations

import re
from typing import BinaryIO

# The usual progressive JPEG has 10 scans.
MAX_SCANS = 32
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_ALONE = {0xD8, 0x01}  # markers without a length


def webp_size(file: BinaryIO) -> tuple[int, int] | None:
    """Width and height of the canvas; None for what is no WebP."""
    file.seek(0)
    head = file.read(30)
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        return None
    kind, data = head[12:16], head[20:]
    if kind == b"VP8X":
        return _little(data[4:7]) + 1, _little(data[7:10]) + 1
    if kind == b"VP8L":
        bits = _little(data[1:5])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return _little(data[6:8]) & 0x3FFF, _little(data[8:10]) & 0x3FFF


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def jpeg_scans(data: bytes, most: int) -> int:
    """How many scans a JPEG has, counted up to ``most`` + 1; 0 for what is no JPEG."""
    if not data.startswith(b"\xff\xd8"):
        return 0
    scans, place = 0, 2
    while scans <= most:
        marker = _MARKER.search(data, place)
        if marker is None:
            break
        code, place = data[marker.start() + 1], marker.end()
        if code == _END_OF_IMAGE:
            break
        if code not in _ALONE:
            place += int.from_bytes(data[place : place + 2], "big")
        scans += code == _START_OF_SCAN
    return scans

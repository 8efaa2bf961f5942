"""Whether the unit of time of a Matroska file is as it was written, where its head has a checksum (CRC-32).

All times of Matroska are counted in one unit (TimestampScale), the stated length too, so that a damaged one contradicts
nothing. FFmpeg adds a checksum (not to WebM), mkvmerge none: then another unit is another speed. All but sound alone is
counted in milliseconds as a rule, and what else is damaged in that element, such as a title, changes no time. Source:
RFC 8794 11.3, RFC 9559 5.1.2.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO

from vlm_pg.media.boundary import DecodeFailure

_SEGMENT, _INFO, _CLUSTER = 0x18538067, 0x1549A966, 0x1F43B675
_CRC = b"\xbf\x84"
_MILLISECONDS = b"\x2a\xd7\xb1\x83" + (1_000_000).to_bytes(3, "big")
_MOST_ELEMENTS, _MOST_BYTES = 1000, 1 << 20


def check_unit(file: BinaryIO, size_bytes: int) -> None:
    """Refuse a file with an unusual unit of time and a wrong checksum over it. Raises DecodeFailure."""
    place = 0
    for _ in range(_MOST_ELEMENTS):
        if place >= size_bytes:
            return
        file.seek(place)
        kind, size, begins = _element(file.read(12))
        if kind == _CLUSTER or not begins:
            return
        place += begins if kind == _SEGMENT else begins + size
        if kind == _INFO and size <= _MOST_BYTES:
            file.seek(place - size)
            data = file.read(size)
            is_wrong = data.startswith(_CRC) and zlib.crc32(data[6:]) != int.from_bytes(data[2:6], "little")
            if is_wrong and _MILLISECONDS not in data:
                raise DecodeFailure(
                    "open",
                    "its unit of time (TimestampScale) is unusual and the checksum over it (Info) is wrong, so its "
                    "times cannot be trusted",
                )
            return


def _element(data: bytes) -> tuple[int, int, int]:
    """Id, size and the length of both; a length of 0 where there is no element."""
    width = 9 - data[0].bit_length() if data else 9
    wide = 9 - data[width].bit_length() if width < len(data) else 9
    if width > 4 or wide > 8 or len(data) < width + wide:
        return 0, 0, 0
    size = int.from_bytes(data[width : width + wide], "big") & ((1 << 7 * wide) - 1)
    return int.from_bytes(data[:width], "big"), size, width + wide

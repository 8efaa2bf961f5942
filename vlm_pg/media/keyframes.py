"""Where decoding may start, by the syntax of the coded picture and not by the container's flag.

Containers call frames key frames that are none: an MP4 without a table of sync samples calls every frame one, and where
pictures are refreshed bit by bit (x264's intra-refresh) the flag stands where the refresh begins, not where it is done.

Sources: ITU-T H.264 7.3.1, 7.4.1, D.1.8; ITU-T H.265 7.3.1.2, 7.4.2.2; ISO/IEC 14496-2 6.2.5; ITU-T H.262 6.2.3;
RFC 6386 9.1; VP9 Bitstream & Decoding Process Specification 6.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_START_CODE = b"\0\0\1"
_SEI_RECOVERY_POINT = 6
_HEVC_RASL = (8, 9)
MAX_UNITS = 64  # headers before the first slice; a picture has few


class Entry(Enum):
    """How a picture can be entered by a decoder that has seen nothing before it.

    ``CLEAN``: all that follows in decoding order is right. ``OPEN``: what is shown from it on is right, pictures stored
    behind it and shown before it are not. ``NONE``: it needs earlier pictures.
    """

    NONE = 0
    OPEN = 1
    CLEAN = 2


@dataclass(frozen=True)
class Syntax:
    """How to read a stream's packets. ``length_bytes``: of the length before each unit; 0 for start codes."""

    codec: str
    length_bytes: int = 0


def syntax_of(codec: str, extradata: bytes | None) -> Syntax:
    """From the codec's name and its configuration record (avcC, hvcC)."""
    extra = extradata or b""
    if codec == "h264" and extra[:1] == b"\1" and len(extra) > 4:
        return Syntax(codec, (extra[4] & 3) + 1)
    if codec == "hevc" and len(extra) > 22 and not extra.startswith((b"\0\0\1", b"\0\0\0\1")):
        return Syntax(codec, (extra[21] & 3) + 1)
    return Syntax(codec)


_PARSED_CODECS = ("h264", "hevc", "mpeg4", "mpeg1video", "mpeg2video", "vp8", "vp9")


def is_looked_into(syntax: Syntax) -> bool:
    """Whether ``entry`` knows better than the container's flag."""
    return syntax.codec in _PARSED_CODECS


def entry(packet: bytes, is_keyframe: bool, syntax: Syntax) -> Entry:
    """How decoding may begin with ``packet``; of codecs that are not looked into, as the container's flag says."""
    if not is_keyframe or not packet:
        return Entry.NONE
    is_intra = True
    match syntax.codec:
        case "h264":
            return _h264(packet, syntax)
        case "hevc":
            return _hevc(packet, syntax)
        case "mpeg4":
            offset = packet.find(b"\0\0\1\xb6") + 4
            is_intra = 3 < offset < len(packet) and packet[offset] >> 6 == 0  # vop_coding_type
        case "mpeg1video" | "mpeg2video":
            is_intra = mpeg2_kind(packet) == 1
        case "vp8":
            is_intra = packet[0] & 1 == 0
        case "vp9":
            # frame_marker, two bits of profile, for profile 3 a reserved one, show_existing_frame, frame_type
            bits = packet[0] << 1 if packet[0] & 0x30 == 0x30 else packet[0]
            is_intra = bits & 0x0C == 0
    return Entry.CLEAN if is_intra else Entry.NONE


def leaves_out(first: bytes, kind: Entry, leading: bytes, syntax: Syntax) -> bool:
    """Whether a decoder that begins with ``first``, of a ``kind``, leaves out what is stored next and shown before it.

    Such a picture may need one before ``first``. HEVC says so of the picture, MPEG-1 and -2 of the group.
    """
    if syntax.codec == "hevc":
        return is_rasl(leading, syntax)
    if syntax.codec in ("mpeg1video", "mpeg2video"):
        offset = first.find(b"\0\0\1\xb8") + 4  # 25 bits of time, closed_gop
        return not (3 < offset < len(first) - 3 and first[offset + 3] & 0x40)
    return syntax.codec == "mpeg4" or kind is Entry.OPEN


def is_rasl(packet: bytes, syntax: Syntax) -> bool:
    """Whether it is a picture of HEVC that says itself that it is left out where decoding begins directly before it."""
    kinds = ((unit[0] >> 1) & 0x3F for unit in units(packet, syntax.length_bytes))
    return syntax.codec == "hevc" and next((kind for kind in kinds if kind < 32), 0) in _HEVC_RASL


def mpeg2_kind(packet: bytes) -> int:
    """The picture_coding_type of MPEG-1 and -2: 1 to 3 for I, P and B; 0 where there is no picture."""
    offset = packet.find(b"\0\0\1\0") + 4
    return packet[offset + 1] >> 3 & 7 if 3 < offset < len(packet) - 1 else 0


def is_shown(packet: bytes, syntax: Syntax) -> bool:
    """Whether the packet's picture is ever shown; VP8 stores some that only serve as references."""
    return not (syntax.codec == "vp8" and packet and not packet[0] & 0x10)


def _h264(packet: bytes, syntax: Syntax) -> Entry:
    recovers = False
    for unit in units(packet, syntax.length_bytes):
        kind = unit[0] & 0x1F
        if kind == 5:
            return Entry.CLEAN
        recovers |= kind == 6 and _recovers_at_once(unit)
        if kind in (1, 2):
            return Entry.OPEN if recovers else Entry.NONE
    return Entry.NONE


def _hevc(packet: bytes, syntax: Syntax) -> Entry:
    for unit in units(packet, syntax.length_bytes):
        kind = (unit[0] >> 1) & 0x3F
        if kind < 32:  # the first slice decides
            return Entry.CLEAN if kind in (19, 20) else Entry.OPEN if kind in (16, 17, 18, 21) else Entry.NONE
    return Entry.NONE


def units(packet: bytes, length_bytes: int) -> Iterator[bytes]:
    """The first units of a packet (their beginnings are enough), without those of no byte."""
    offset = 0
    for _ in range(MAX_UNITS):
        if length_bytes:
            start = offset + length_bytes
            offset = start + int.from_bytes(packet[offset:start], "big")
        else:
            start = packet.find(_START_CODE, offset) + 3
            if start == 2:
                return
            offset = start
        if start >= len(packet):
            return
        yield packet[start : start + 1024]


def _recovers_at_once(unit: bytes) -> bool:
    """Whether an SEI unit says that pictures are right from this one on (a recovery point of zero frames)."""
    data = unit[1:].replace(b"\0\0\3", b"\0\0")
    offset = 0
    while offset + 2 <= len(data) and data[offset] != 0x80:
        kind, offset = _ff_number(data, offset)
        size, offset = _ff_number(data, offset)
        if kind == _SEI_RECOVERY_POINT and offset < len(data):
            return bool(data[offset] & 0x80)  # recovery_frame_cnt as Exp-Golomb: a first bit of 1 is zero frames
        offset += size
    return False


def _ff_number(data: bytes, offset: int) -> tuple[int, int]:
    """A number written as a run of 255s and a last byte, and the offset after it."""
    value = 0
    while offset < len(data) and data[offset] == 255:
        value, offset = value + 255, offset + 1
    return (value + data[offset], offset + 1) if offset < len(data) else (value, offset)

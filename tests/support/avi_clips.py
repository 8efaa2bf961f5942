"""AVI files as DivX and XviD wrote them: packed B-frames, pictures that are not coded, empty chunks.

Sources: ISO/IEC 14496-2 6.2.2, 6.2.5 (user data, vop_coded); Microsoft's description of AVI (avih, strh, strf, movi,
idx1); what FFmpeg's filter mpeg4_unpack_bframes says of packed bitstreams.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from tests.support.clips import RATE, number_of
from tests.support.frame_folders import coloured

_VOP, _USER_DATA, _GROUP = b"\0\0\1\xb6", b"\0\0\1\xb2", b"\0\0\1\xb3"
PACKED = b"DivX503b1393p"
INTRA, PREDICTED, BOTH_WAYS = range(3)


def encoded(codec: str, frames: int, **options: str) -> list[bytes]:
    """Pictures as an encoder stores them, in that order."""
    encoder = av.CodecContext.create(codec, "w")
    encoder.width, encoder.height = 96, 64
    encoder.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    encoder.time_base, encoder.framerate = Fraction(1, RATE), Fraction(RATE)
    encoder.options = {"g": "12", "b": "2M", "threads": "1", "sc_threshold": "1000000000", **options}
    packets = []
    for number in range(frames):
        frame = av.VideoFrame.from_ndarray(coloured(number), format="rgb24").reformat(format=encoder.pix_fmt)
        frame.pts, frame.time_base = number, Fraction(1, RATE)
        packets += encoder.encode(frame)
    return [bytes(packet) for packet in [*packets, *encoder.encode(None)]]


def kind_of(vop: bytes) -> int:
    """vop_coding_type of the first picture of MPEG-4 in a chunk."""
    return vop[vop.index(_VOP) + 4] >> 6


def not_coded(like: bytes) -> bytes:
    """A picture that says it is the one before it: the header of ``like`` up to its time, vop_coded 0.

    The encoder counts 25 to a second: after one bit a second of modulo_time_base and a marker come 5 bits of time.
    """
    offset = like.index(_VOP) + 4
    bits = "".join(f"{byte:08b}" for byte in like[offset : offset + 8])
    seconds = bits.index("0", 2) + 1
    head = "01" + bits[2:seconds] + "1" + bits[seconds + 1 : seconds + 6] + "1" + "0" + "0"
    head += "1" * (-len(head) % 8)
    return _VOP + bytes(int(head[at : at + 8], 2) for at in range(0, len(head), 8))


def marked_packed(vops: Sequence[bytes]) -> list[bytes]:
    """The same with DivX's mark of a packed stream in place of the encoder's own in each intra picture."""
    marked = []
    for vop in vops:
        if kind_of(vop) == INTRA:
            start = vop.find(_USER_DATA)
            end = min(at for at in (vop.find(_VOP), vop.find(_GROUP)) if at >= 0)
            vop = vop[: start if start >= 0 else end] + _USER_DATA + PACKED + vop[end:]
        marked.append(vop)
    return marked


def packed(vops: Sequence[bytes]) -> list[bytes]:
    """Chunks as DivX packs them: a picture and the first B-frame behind it, the other ones, a not-coded one."""
    chunks: list[bytes] = []
    group: list[bytes] = []
    for vop in [*marked_packed(vops), b""]:
        if vop and kind_of(vop) == BOTH_WAYS:
            group.append(vop)
            continue
        if len(group) > 1:
            chunks += [group[0] + group[1], *group[2:], not_coded(group[0])]
        else:
            chunks += group
        group = [vop]
    return chunks


def write_avi(path: Path, chunks: Sequence[bytes], fourcc: bytes = b"XVID", keys: Sequence[int] | None = None) -> Path:
    """An AVI file of these chunks, ``RATE`` a second. ``keys``: offsets flagged in its index; None: intra pictures."""
    if keys is None:
        keys = [offset for offset, chunk in enumerate(chunks) if _VOP not in chunk or kind_of(chunk) == INTRA]
    most = max(map(len, chunks))
    header = struct.pack("<14I", 1_000_000 // RATE, 0, 0, 0x10, len(chunks), 0, 1, most, 96, 64, 0, 0, 0, 0)
    stream = struct.pack(
        "<4s4sIHHIIIIIIiI4h", b"vids", fourcc, 0, 0, 0, 0, 1, RATE, 0, len(chunks), most, -1, 0, 0, 0, 96, 64
    )
    picture = struct.pack("<IiiHH4sIiiII", 40, 96, 64, 1, 24, fourcc, 96 * 64 * 3, 0, 0, 0, 0)
    movi, index = b"movi", b""
    for offset, chunk in enumerate(chunks):
        index += struct.pack("<4sIII", b"00dc", 0x10 if offset in keys else 0, len(movi), len(chunk))
        movi += _chunk(b"00dc", chunk)
    lists = _chunk(b"LIST", b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", picture))
    whole = _chunk(b"LIST", b"hdrl" + _chunk(b"avih", header) + lists) + _chunk(b"LIST", movi) + _chunk(b"idx1", index)
    path.write_bytes(_chunk(b"RIFF", b"AVI " + whole))
    return path


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def decoded(path: Path) -> list[tuple[float, np.ndarray]]:
    """Times and pictures of the whole file as FFmpeg gives them from its start: the oracle."""
    with av.open(str(path)) as container:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return [(-1.0 if time is None else time, pixels) for time, pixels in frames]


def numbers(path: Path) -> list[int | None]:
    """The numbers that they show."""
    return [number_of(pixels) for _, pixels in decoded(path)]

"""H.264 whose pictures are stored as two fields each, which no encoder at hand makes: samples are written as they are.

Only headers and macroblocks of the kind I_PCM are written, so any order of pictures and fields can be had. Source:
ITU-T H.264 7.3, E.1.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.clips import picture

WIDTH, HEIGHT = 96, 64
GROUP = 12
SLICE_KINDS = {"I": 2, "P": 0, "B": 1}
PCM_KINDS = {"I": 25, "P": 30, "B": 48}  # mb_type of I_PCM


@dataclass(frozen=True)
class Fields:
    """How a clip is stored.

    ``b_frames``: between two others. ``slices``: of a field, 1 or 2. ``is_high``: a profile whose parameter set
    states scaling lists. ``bottom_first``, ``is_frame``: pictures by their numbers whose lower field comes first, and
    that are stored whole.
    """

    b_frames: int = 2
    bottom_first: tuple[int, ...] = ()
    slices: int = 1
    is_high: bool = False
    is_frame: tuple[int, ...] = ()


class _Writer:
    def __init__(self) -> None:
        self.data, self.bits = bytearray(), ""

    def put(self, value: int, count: int) -> None:
        self.bits += f"{value:0{count}b}"

    def number(self, *values: int) -> None:
        for value in values:
            self.bits += "0" * ((value + 1).bit_length() - 1) + f"{value + 1:b}"

    def align(self, first: str = "") -> None:
        self.bits += first
        self.bits += "0" * (-len(self.bits) % 8)
        self.data += int(self.bits or "0", 2).to_bytes(len(self.bits) // 8, "big")
        self.bits = ""

    def unit(self, head: int) -> bytes:
        self.align("1")
        out, zeros = bytearray(b"\0\0\0\1" + bytes([head])), 0
        for byte in self.data:
            if zeros >= 2 and byte <= 3:
                out.append(3)
                zeros = 0
            out.append(byte)
            zeros = zeros + 1 if byte == 0 else 0
        return bytes(out)


def parameter_sets(how: Fields) -> bytes:
    """Fields may come, frame_num and the order count have 8 bits; 50 fields a second, one picture is held back."""
    sequence = _Writer()
    sequence.put(100 if how.is_high else 77, 8)
    sequence.put(0, 8)
    sequence.put(30, 8)
    sequence.number(0)
    if how.is_high:
        sequence.number(1, 0, 0)
        sequence.put(0b01, 2)
        for size in (16,) * 6 + (64,) * 2:
            sequence.put(1, 1)
            sequence.number(15, *(0,) * (size - 1))  # the first step is of 8, all entries are 16
    sequence.number(4, 0, 4, 4)
    sequence.put(0, 1)
    sequence.number(WIDTH // 16 - 1, HEIGHT // 32 - 1)
    sequence.put(0b0010100001, 10)  # fields, no adaptive frames; behind no cropping what is said of times
    sequence.put(1, 32)
    sequence.put(50, 32)
    sequence.put(0b10001, 5)
    sequence.put(1, 1)
    sequence.number(0, 0, 10, 10, 1 if how.b_frames else 0, 4)
    pictures = _Writer()
    pictures.number(0, 0)
    pictures.put(0, 2)
    pictures.number(0, 0, 0)
    pictures.put(0, 3)
    pictures.number(0, 0, 0)
    pictures.put(0, 3)
    return sequence.unit(0x67) + pictures.unit(0x68)


def picture_units(number: int, kind: str, after: int, order: int, how: Fields, is_idr: bool) -> list[bytes]:
    """A picture's one or two packets. ``after``: its frame_num. ``order``: its position in the group as shown."""
    luma = picture(number)[..., 0]
    if number in how.is_frame:
        return [_coded(luma, kind, after, 2 * order, None, how, is_idr)]
    parities = (1, 0) if number in how.bottom_first else (0, 1)
    second = "P" if kind == "I" else kind
    return [
        _coded(luma[parity::2], kind if nth == 0 else second, after, 2 * order + nth, parity, how, is_idr and nth == 0)
        for nth, parity in enumerate(parities)
    ]


def _coded(
    luma: np.ndarray, kind: str, frame_num: int, count: int, parity: int | None, how: Fields, is_idr: bool
) -> bytes:
    rows, columns = luma.shape[0] // 16, luma.shape[1] // 16
    units = b""
    for part in range(how.slices):
        first, end = part * rows // how.slices * columns, (part + 1) * rows // how.slices * columns
        writer = _Writer()
        writer.number(first, SLICE_KINDS[kind], 0)
        writer.put(frame_num % 256, 8)
        writer.put(0 if parity is None else 2 + parity, 1 if parity is None else 2)
        if is_idr:
            writer.number(0)
        writer.put(count % 256, 8)
        # no direct_spatial_mv_pred; as many references as ever, in their order; then how this one is kept
        writer.put(0, {"I": 0, "P": 2, "B": 4}[kind] + (0 if kind == "B" else 2 if is_idr else 1))
        writer.number(0)
        for at in range(first, end):
            if kind != "I":
                writer.number(0)
            writer.number(PCM_KINDS[kind])
            writer.align()
            row, column = divmod(at, columns)
            writer.data += luma[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].tobytes() + b"\x80" * 128
        units += writer.unit((0 if kind == "B" else 0x60) | (5 if is_idr else 1))
    return units


def pictures(how: Fields, count: int) -> Iterator[tuple[int, list[bytes]]]:
    """Number and packets of each picture, as they are stored; groups are closed."""
    for start in range(0, count, GROUP):
        inside = range(start, min(count, start + GROUP))
        stored = [(inside[0], "I")]
        anchors = [*inside[how.b_frames + 1 :: how.b_frames + 1]]
        if anchors[-1:] != [inside[-1]] and len(inside) > 1:
            anchors.append(inside[-1])
        for before, anchor in zip([inside[0], *anchors], anchors, strict=False):
            stored += [(anchor, "P"), *((number, "B") for number in range(before + 1, anchor))]
        frame_num = 0
        for nth, (number, kind) in enumerate(stored):
            frame_num += int(nth > 0 and stored[nth - 1][1] != "B")
            units = picture_units(number, kind, frame_num, number - start, how, is_idr=nth == 0)
            if nth == 0:
                units[0] = parameter_sets(how) + units[0]
            yield number, units


def write_fields(path: Path, how: Fields, count: int, together: bool = False, second_time: bool = True) -> Path:
    """A clip of 25 pictures a second in any container.

    Args:
        together: both fields of a picture in one packet.
        second_time: whether packets of second fields have a time.
    """

    import av

    raw = path.with_suffix(".h264")
    stored = list(pictures(how, count))
    raw.write_bytes(b"".join(unit for _, units in stored for unit in units))
    with av.open(str(raw), format="h264") as old, av.open(str(path), "w") as new:
        stream: Any = new.add_stream_from_template(old.streams.video[0])
        for nth, (number, units) in enumerate(stored):
            for position, unit in enumerate([b"".join(units)] if together else units):
                packet = av.Packet(unit)
                packet.stream, packet.time_base = stream, Fraction(1, 50)
                packet.dts = 2 * nth + position
                packet.pts = (
                    2 * number + position + (2 if how.b_frames else 0) if position == 0 or second_time else None
                )
                packet.is_keyframe = position == 0 and number % GROUP == 0
                packet.duration = 2 // len(units) if not together else 2
                new.mux(packet)
    return path

"""H.264 whose pictures are stored as two fields (1080i, AVCHD, Blu-ray): which packets hold a second one.

FFmpeg's parsers hand each field on as a packet of its own, and decoders put both into one frame, at the time of the
first. Source: ITU-T H.264 3.30, 7.3.2.1.1, 7.3.2.2, 7.3.3, 7.4.1.2.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vlm_pg.media.keyframes import MAX_UNITS, Syntax, units

_SLICES, _SPS, _PPS = (1, 5), 7, 8
_IDR = 5
# profiles whose parameter sets say more of colours
_HIGH = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244)
_444 = 3


class _OutOfBits(Exception):
    """A unit is shorter than what it announces."""


class _Bits:
    """The bits of a unit behind its first byte."""

    def __init__(self, unit: bytes):
        data = unit[1:].replace(b"\0\0\3", b"\0\0")
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        """u(count)"""
        self._left -= count
        if self._left < 0:
            raise _OutOfBits
        return self._value >> self._left & ((1 << count) - 1)

    def number(self) -> int:
        """ue(v); se(v) has the same length"""
        zeros = 0
        while not self.take(1):
            zeros += 1
        return (1 << zeros) - 1 + self.take(zeros)

    def signed(self) -> int:
        """se(v)"""
        number = self.number()
        return (number + 1) // 2 if number % 2 else -(number // 2)


@dataclass(frozen=True)
class _Sequence:
    """What a sequence parameter set says of slices. ``colour_bits``: of colour_plane_id."""

    colour_bits: int
    frame_num_bits: int
    has_fields: bool


@dataclass(frozen=True)
class _Field:
    """What the slices of a field share."""

    sequence: int
    frame_num: int
    is_bottom: bool
    is_reference: bool
    is_idr: bool

    def completes(self, first: _Field) -> bool:
        """Whether both are one frame, this one stored second."""
        return (
            not self.is_idr
            and self.is_bottom != first.is_bottom
            and (self.sequence, self.frame_num, self.is_reference)
            == (first.sequence, first.frame_num, first.is_reference)
        )


@dataclass
class FieldPairs:
    """Follows the packets of a stream as they are stored; where it cannot be sure, none is a second field.

    ``is_alone``: whether the packet before the last one held a field whose other one does not follow. What is made
    from it comes out wrong, and no decoder says so.

    Args:
        syntax, extradata: the stream's.
    """

    syntax: Syntax
    extradata: bytes = b""
    is_alone: bool = False
    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _pictures: dict[int, int] = field(default_factory=dict)
    _first: _Field | None = None

    def __post_init__(self) -> None:
        if self.syntax.codec == "h264":
            for unit in _stated(self.extradata):
                self._learn(unit)

    def is_second(self, coded: memoryview, is_keyframe: bool) -> bool:
        """Whether the next packet is the second field of the picture before it. Parameter sets come with key frames."""
        if self.syntax.codec != "h264" or not (is_keyframe or self._has_fields()):
            return False
        found = self._only_field(bytes(coded))
        is_second = found is not None and self._first is not None and found.completes(self._first)
        self.is_alone = self._first is not None and not is_second
        self._first = None if is_second else found
        return is_second

    def _has_fields(self) -> bool:
        return any(sequence.has_fields for sequence in self._sequences.values())

    def _only_field(self, packet: bytes) -> _Field | None:
        """The field that a packet holds; None for a frame, for both fields, and for what cannot be read."""
        slices, count = set[_Field | None](), 0
        for unit in units(packet, self.syntax.length_bytes):
            count += 1
            if unit[0] & 0x1F in _SLICES:
                slices.add(self._field(unit))
            else:
                self._learn(unit)
        return slices.pop() if len(slices) == 1 and count < MAX_UNITS else None

    def _learn(self, unit: bytes) -> None:
        kind, bits = unit[0] & 0x1F, _Bits(unit.split(b"\0\0\1", 1)[0])  # up to the next one
        try:
            if kind == _SPS:
                place, sequence = _sequence(bits)
                self._sequences[place] = sequence
            elif kind == _PPS:
                self._pictures[bits.number()] = bits.number()
        except _OutOfBits:
            self._sequences.clear()  # which of them it replaces is not known

    def _field(self, unit: bytes) -> _Field | None:
        bits = _Bits(unit[:64])
        try:
            bits.number(), bits.number()  # first_mb_in_slice, slice_type
            place = self._pictures.get(bits.number(), -1)
            sequence = self._sequences.get(place)
            if sequence is None or not sequence.has_fields:
                return None
            bits.take(sequence.colour_bits)
            frame_num = bits.take(sequence.frame_num_bits)
            if not bits.take(1):  # field_pic_flag
                return None
            return _Field(place, frame_num, bool(bits.take(1)), bool(unit[0] & 0x60), unit[0] & 0x1F == _IDR)
        except _OutOfBits:
            return None


def _stated(extradata: bytes) -> Iterator[bytes]:
    """The parameter sets of a configuration record (avcC), or of a stream with start codes."""
    if not extradata.startswith(b"\1"):
        yield from units(extradata, 0)
        return
    place = 5
    for mask in (0x1F, 0xFF):
        count = int.from_bytes(extradata[place : place + 1], "big") & mask
        place += 1
        for _ in range(count):
            start = place + 2
            place = start + int.from_bytes(extradata[place:start], "big")
            if start < len(extradata):
                yield extradata[start:place]


def _sequence(bits: _Bits) -> tuple[int, _Sequence]:
    """Of a sequence parameter set, with its id."""
    profile = bits.take(8)
    bits.take(16)  # constraints, level
    place = bits.number()
    colour_bits = _skip_colours(bits) if profile in _HIGH else 0
    frame_num_bits = bits.number() + 4
    _skip_order_count(bits)
    bits.number(), bits.take(1), bits.number(), bits.number()  # reference frames, gaps, width, height
    return place, _Sequence(colour_bits, frame_num_bits, has_fields=not bits.take(1))


def _skip_colours(bits: _Bits) -> int:
    """Chroma format, depths, scaling lists; returns the bits that colour_plane_id has in slices."""
    chroma = bits.number()
    is_separate = bits.take(1) if chroma == _444 else 0
    bits.number(), bits.number(), bits.take(1)
    if bits.take(1):
        for at in range(12 if chroma == _444 else 8):
            if bits.take(1):
                _skip_scaling_list(bits, 16 if at < 6 else 64)
    return 2 * is_separate


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    last, following = 8, 8
    for _ in range(size):
        if following:
            following = (last + bits.signed()) % 256
        last = following or last


def _skip_order_count(bits: _Bits) -> None:
    kind = bits.number()
    if kind == 0:
        bits.number()
    elif kind == 1:
        bits.take(1), bits.number(), bits.number()
        for _ in range(bits.number()):
            bits.number()

"""Coded pictures, packet by packet as stored: which packets make a frame, in which order frames come, which is first.

Sources: ITU-T H.264 3.30, 7.3.2.1.1, 7.3.2.2, 7.3.3, 7.4.1.2.4 (fields); ISO/IEC 14496-2 6.2.3 (VideoObjectLayer),
6.2.5 (VideoObjectPlane); ITU-T H.262 6.1.1.11 (order).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.media.keyframes import MAX_UNITS, Entry, Syntax, entry, mpeg2_kind, units

_SLICES, _SPS, _PPS = (1, 5), 7, 8
_IDR = 5
# profiles whose parameter sets say more of colours
_HIGH = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244)
_444 = 3


class _OutOfBits(Exception):
    """A unit is shorter than its syntax needs."""


class _Bits:
    """The bits of a header, from the first on.

    Args:
        padded: zeros follow the last bit; else reading beyond it raises ``_OutOfBits``.
    """

    def __init__(self, content: bytes, padded: bool = False):
        self._value, self.left, self._padded = int.from_bytes(content, "big"), 8 * len(content), padded

    @classmethod
    def of_unit(cls, unit: bytes) -> _Bits:
        """A unit of H.264 behind its first byte, without emulation prevention."""
        return cls(unit[1:].replace(b"\0\0\3", b"\0\0"))

    def take(self, count: int) -> int:
        """u(count): the next bits as a number."""
        self.left -= count
        if self.left < 0 and not self._padded:
            raise _OutOfBits
        return (self._value >> self.left if self.left >= 0 else self._value << -self.left) & ((1 << count) - 1)

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
    """Which packets of H.264 hold a second field, of pictures stored as two (1080i, AVCHD, Blu-ray); in doubt none.

    FFmpeg's parsers hand each field on as a packet of its own, and decoders put both into one frame, at the time of the
    first.

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
        """The field that a packet holds; None for a frame, for both fields, and for an unreadable packet."""
        slices, count = set[_Field | None](), 0
        for unit in units(packet, self.syntax.length_bytes):
            count += 1
            if unit[0] & 0x1F in _SLICES:
                slices.add(self._field(unit))
            else:
                self._learn(unit)
        return slices.pop() if len(slices) == 1 and count < MAX_UNITS else None

    def _learn(self, unit: bytes) -> None:
        kind, bits = unit[0] & 0x1F, _Bits.of_unit(unit.split(b"\0\0\1", 1)[0])  # up to the next one
        try:
            if kind == _SPS:
                place, sequence = _sequence(bits)
                self._sequences[place] = sequence
            elif kind == _PPS:
                self._pictures[bits.number()] = bits.number()
        except _OutOfBits:
            self._sequences.clear()  # which of them it replaces is not known

    def _field(self, unit: bytes) -> _Field | None:
        bits = _Bits.of_unit(unit[:64])
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


_VOP = b"\0\0\1\xb6"
_LAYER_CODES = range(0x20, 0x30)
_EXTENDED_ASPECT, _RECTANGULAR = 15, 0
# A picture that is not coded is a header alone. Of larger packets only start codes are looked for.
MOST_HEADER_BYTES = 64
MOST_PACKED_PICTURES = 16


@dataclass
class Mpeg4Pictures:
    """How many frames a packet of MPEG-4 part 2 stands for: DivX and XviD in AVI store none, one or two pictures in it.

    AVI gives every packet one time, that of its place. So that B-frames could be stored there, encoders put one into
    the packet of the picture before it ("packed"), and fill the place that is then left over with a picture that is not
    coded. The same kind of picture elsewhere says that the one before it stays on display, and no decoder shows a frame
    for it. Of a B-frame in the very last packet, behind which no place follows, FFmpeg's decoder shows nothing; it is
    no frame here.

    ``is_packed``: whether one held several pictures. ``time_bits``: of vop_time_increment; 0 while no layer's header
    was seen.
    """

    syntax: Syntax
    extradata: bytes = b""
    is_packed: bool = False
    time_bits: int = 0
    _left_over: int = 0

    def __post_init__(self) -> None:
        if self.syntax.codec == "mpeg4":
            self._read_layer(self.extradata)

    def is_frame(self, coded: memoryview) -> bool:
        """Whether the next packet is a frame more, by its time; what is not coded is one where a place is left over."""
        if self.syntax.codec != "mpeg4":
            return True
        packet = bytes(coded)
        self._read_layer(packet)
        count = self._coded(packet)
        if count:
            self._left_over += count - 1
            self.is_packed |= count > 1
            return True
        self._left_over -= 1
        if self._left_over < 0:
            self._left_over = 0
            return False
        return True

    def _coded(self, packet: bytes) -> int:
        """How many coded pictures it holds; one of which that is not known counts as coded."""
        places: list[int] = []
        place = packet.find(_VOP)
        while place >= 0 and len(places) < MOST_PACKED_PICTURES:
            places.append(place + 4)
            place = packet.find(_VOP, place + 4)
        if not places:
            return 1
        return sum(self._is_coded(packet[place : place + MOST_HEADER_BYTES]) for place in places)

    def _is_coded(self, header: bytes) -> bool:
        """vop_coded of a picture's header behind its start code."""
        if not self.time_bits:
            return True
        bits = _Bits(header, padded=True)
        bits.take(2)  # vop_coding_type
        while bits.take(1):  # modulo_time_base
            pass
        bits.take(1 + self.time_bits + 1)
        return bits.left <= 0 or bool(bits.take(1))

    def _read_layer(self, packet: bytes) -> None:
        """How long times are, from the header of a video object layer, if there is one."""
        place = packet.find(b"\0\0\1")
        while 0 <= place < len(packet) - 4 and packet[place + 3] not in _LAYER_CODES:
            if packet[place + 3] == _VOP[3]:
                return
            place = packet.find(b"\0\0\1", place + 3)
        if not 0 <= place < len(packet) - 4:
            return
        bits = _Bits(packet[place + 4 : place + 4 + MOST_HEADER_BYTES], padded=True)
        bits.take(1 + 8)  # random_accessible_vol, video_object_type_indication
        if bits.take(1):  # is_object_layer_identifier
            bits.take(4 + 3)
        if bits.take(4) == _EXTENDED_ASPECT:
            bits.take(8 + 8)
        if bits.take(1):  # vol_control_parameters
            bits.take(2 + 1)
            if bits.take(1):  # vbv_parameters
                bits.take(79)
        shape = bits.take(2)
        bits.take(1)
        resolution = bits.take(16)
        known = shape == _RECTANGULAR and resolution > 0 and bits.left > 0
        self.time_bits = max(1, (resolution - 1).bit_length()) if known else 0


_CODECS = ("mpeg1video", "mpeg2video")
_B = 3
HEAD_BYTES = 4096  # headers and user data before that of the picture


@dataclass
class ShownOrder:
    """The order in which pictures of MPEG-1 and -2 come out: B pictures at once, others when the next one is stored.

    Program streams state few times. FFmpeg makes up the others, not always as the pictures come: two may get one time,
    and one that comes later an earlier one.

    ``ascends``: whether no timestamp is below that of a picture that comes out before. ``come``: timestamps in the
    order in which pictures come out. Of other codecs nothing is known.
    """

    syntax: Syntax
    ascends: bool = True
    come: list[int] = field(default_factory=list)
    _latest: int | None = None
    _held: int | None = None

    def add(self, coded: memoryview, pts: int) -> None:
        """The next picture as stored."""
        if self.syntax.codec not in _CODECS:
            return
        if mpeg2_kind(bytes(coded[:HEAD_BYTES])) == _B:
            self._come(pts)
            return
        if self._held is not None:
            self._come(self._held)
        self._held = pts

    def end(self) -> None:
        """No picture follows."""
        if self._held is not None:
            self._come(self._held)

    def _come(self, pts: int) -> None:
        self.ascends &= self._latest is None or pts >= self._latest
        self._latest = pts
        self.come.append(pts)

    def is_at_its_place(self, pts: int, shown: Sequence[int]) -> bool:
        """Whether the picture of a time comes as its place among all times says: counting may begin with it."""
        place = bisect_left(shown, pts)
        return self.ascends or (place < len(shown) and self.come[place] == pts)

    def is_reference(self, coded: memoryview) -> bool:
        """Whether it is a picture of MPEG-1 or -2 behind which none is stored that is shown before those before it."""
        return self.syntax.codec in _CODECS and mpeg2_kind(bytes(coded[:HEAD_BYTES])) in (1, 2)


# decoders of these show nothing before an intra picture
_BEGIN_AT_INTRA = ("hevc", "mpeg1video", "mpeg2video")
# The decoder of H.264 has rules of its own, with recovery points that are reached picture by picture. So it is run.
_DECODED = ("h264",)
MOST_LOST_PICTURES = 1024  # until it shows one


@dataclass
class LateStart:
    """The first frame of a file that begins amid a group of pictures, as recordings of broadcasts do.

    Pictures stored before the first entry point need others that are gone, and no decoder shows them.

    ``begins``: whether the stream begins with its first flagged entry point, all pictures stored before being lost.
    ``first``: the timestamp of the first frame of a decoder that had to be run; None where it gave none.
    """

    syntax: Syntax
    first: int | None = None
    begins: bool = False
    _seen: int = 0
    _is_open: bool = True

    def follow(self, packet: Any, coded: memoryview) -> None:
        """The next packet, ``coded`` its content."""
        if not self._is_open or not len(coded):
            return
        # whether or not it is flagged: flags may be missing
        is_entry = entry(bytes(coded), True, self.syntax) is not Entry.NONE
        if self.syntax.codec in _BEGIN_AT_INTRA:
            self.begins = is_entry and self._seen > 0 and packet.is_keyframe
            self._is_open = not is_entry
        elif self.syntax.codec in _DECODED and not (is_entry and not self._seen):
            self._is_open = not self._has_shown(packet) and self._seen < MOST_LOST_PICTURES
        else:
            self._is_open = False
        self._seen += 1

    def _has_shown(self, packet: Any) -> bool:
        import av

        try:
            frames = packet.decode()
        except av.FFmpegError:  # of a picture that is never shown
            return False
        if frames and not frames[0].is_corrupt:
            self.first = frames[0].pts
        return bool(frames)

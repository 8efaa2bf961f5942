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
# profiles whose parameter sets have chroma fields
_HIGH_PROFILES = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244)
_444 = 3


class _OutOfBits(Exception):
    """A unit is shorter than its syntax needs."""


class _Bits:
    """The bits of a header. ``padded``: zeros follow the last bit; else reading beyond it raises ``_OutOfBits``."""

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


@dataclass(frozen=True)
class _SequenceParameters:
    """How slices are written. ``colour_bits``: of colour_plane_id."""

    colour_bits: int
    frame_num_bits: int
    has_fields: bool


@dataclass(frozen=True)
class _Field:
    """Header values that the slices of a field share."""

    sps_id: int
    frame_num: int
    is_bottom: bool
    is_reference: bool
    is_idr: bool

    def completes(self, first: _Field) -> bool:
        """Whether both are one frame, this one stored second."""
        same = (self.sps_id, self.frame_num, self.is_reference) == (first.sps_id, first.frame_num, first.is_reference)
        return same and not self.is_idr and self.is_bottom != first.is_bottom


@dataclass
class FieldPairs:
    """Which packets of H.264 hold a second field, of pictures stored as two (1080i, AVCHD, Blu-ray); in doubt none.

    FFmpeg's parsers hand each field on as a packet of its own, and decoders put both into one frame, at the time of the
    first.

    ``is_alone``: whether the packet before the last one held a field whose other one does not follow. It decodes to a
    wrong frame without any error.
    """

    syntax: Syntax
    extradata: bytes = b""
    is_alone: bool = False
    _sps: dict[int, _SequenceParameters] = field(default_factory=dict)
    _sps_of_pps: dict[int, int] = field(default_factory=dict)
    _first: _Field | None = None

    def __post_init__(self) -> None:
        if self.syntax.codec == "h264":
            for unit in _parameter_sets(self.extradata):
                self._read_parameters(unit)

    def is_second(self, coded: memoryview, is_keyframe: bool) -> bool:
        """Whether the next packet is the second field of the picture before it. Parameter sets come with key frames."""
        if self.syntax.codec != "h264" or not (is_keyframe or any(sps.has_fields for sps in self._sps.values())):
            return False
        found = self._only_field(bytes(coded))
        is_second = found is not None and self._first is not None and found.completes(self._first)
        self.is_alone = self._first is not None and not is_second
        self._first = None if is_second else found
        return is_second

    def _only_field(self, packet: bytes) -> _Field | None:
        """The field that a packet holds; None for a frame, for both fields, and for an unreadable packet."""
        slices, count = set[_Field | None](), 0
        for unit in units(packet, self.syntax.length_bytes):
            count += 1
            if unit[0] & 0x1F in _SLICES:
                slices.add(self._field(unit))
            else:
                self._read_parameters(unit)
        return slices.pop() if len(slices) == 1 and count < MAX_UNITS else None

    def _read_parameters(self, unit: bytes) -> None:
        kind, bits = unit[0] & 0x1F, _Bits.of_unit(unit.split(b"\0\0\1", 1)[0])  # up to the next one
        try:
            if kind == _SPS:
                sps_id, sps = _read_sps(bits)
                self._sps[sps_id] = sps
            elif kind == _PPS:
                self._sps_of_pps[bits.number()] = bits.number()
        except _OutOfBits:
            self._sps.clear()  # which of them it replaces is not known

    def _field(self, unit: bytes) -> _Field | None:
        bits = _Bits.of_unit(unit[:64])
        try:
            bits.number(), bits.number()  # first_mb_in_slice, slice_type
            sps_id = self._sps_of_pps.get(bits.number(), -1)
            sps = self._sps.get(sps_id)
            if sps is None or not sps.has_fields:
                return None
            bits.take(sps.colour_bits)
            frame_num = bits.take(sps.frame_num_bits)
            if not bits.take(1):  # field_pic_flag
                return None
            return _Field(sps_id, frame_num, bool(bits.take(1)), bool(unit[0] & 0x60), unit[0] & 0x1F == _IDR)
        except _OutOfBits:
            return None


def _parameter_sets(extradata: bytes) -> Iterator[bytes]:
    """The parameter sets of a configuration record (avcC), or of a stream with start codes."""
    if not extradata.startswith(b"\1"):
        yield from units(extradata, 0)
        return
    offset = 5
    for mask in (0x1F, 0xFF):
        count = int.from_bytes(extradata[offset : offset + 1], "big") & mask
        offset += 1
        for _ in range(count):
            start = offset + 2
            offset = start + int.from_bytes(extradata[offset:start], "big")
            if start < len(extradata):
                yield extradata[start:offset]


def _read_sps(bits: _Bits) -> tuple[int, _SequenceParameters]:
    """Id and content of a sequence parameter set."""
    profile = bits.take(8)
    bits.take(16)  # constraints, level
    sps_id = bits.number()
    colour_bits = _skip_colours(bits) if profile in _HIGH_PROFILES else 0
    frame_num_bits = bits.number() + 4
    order_count_type = bits.number()
    if order_count_type == 0:
        bits.number()
    elif order_count_type == 1:
        bits.take(1), bits.number(), bits.number()
        for _ in range(bits.number()):
            bits.number()
    bits.number(), bits.take(1), bits.number(), bits.number()  # reference frames, gaps, width, height
    return sps_id, _SequenceParameters(colour_bits, frame_num_bits, has_fields=not bits.take(1))


def _skip_colours(bits: _Bits) -> int:
    """Chroma format, depths, scaling lists; returns the bits that colour_plane_id has in slices."""
    chroma = bits.number()
    is_separate = bits.take(1) if chroma == _444 else 0
    bits.number(), bits.number(), bits.take(1)
    if bits.take(1):
        for number in range(12 if chroma == _444 else 8):
            if bits.take(1):
                _skip_scaling_list(bits, 16 if number < 6 else 64)
    return 2 * is_separate


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    last, following = 8, 8
    for _ in range(size):
        if following:
            number = bits.number()  # se(v)
            following = (last + ((number + 1) // 2 if number % 2 else -(number // 2))) % 256
        last = following or last


_VOP = b"\0\0\1\xb6"
_LAYER_CODES = range(0x20, 0x30)
_EXTENDED_ASPECT, _RECTANGULAR = 15, 0
# A picture that is not coded is a header alone. Of larger packets only start codes are looked for.
MOST_HEADER_BYTES = 64
MOST_PACKED_PICTURES = 16


@dataclass
class Mpeg4Pictures:
    """How many frames a packet of MPEG-4 part 2 stands for: DivX and XviD in AVI store none, one or two pictures in it.

    AVI derives a packet's time from its number. So that B-frames could be stored there, encoders put one into the
    packet of the picture before it ("packed"), and fill the packet that is then left over with a picture that is not
    coded. The same kind of picture elsewhere says that the one before it stays on display, and no decoder shows a frame
    for it. Of a B-frame in the very last packet, behind which no packet follows, FFmpeg's decoder shows nothing; it is
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
        """Whether the next packet is one more frame; one without coded pictures is while packed ones are left over."""
        if self.syntax.codec != "mpeg4":
            return True
        packet = bytes(coded)
        self._read_layer(packet)
        count = self._coded(packet)
        self.is_packed |= count > 1
        self._left_over += count - 1
        is_frame = self._left_over >= 0
        self._left_over = max(0, self._left_over)
        return is_frame

    def _coded(self, packet: bytes) -> int:
        """How many coded pictures it holds; one of which that is not known counts as coded."""
        offsets: list[int] = []
        offset = packet.find(_VOP)
        while offset >= 0 and len(offsets) < MOST_PACKED_PICTURES:
            offsets.append(offset + 4)
            offset = packet.find(_VOP, offset + 4)
        return sum(self._is_coded(packet[offset : offset + MOST_HEADER_BYTES]) for offset in offsets) if offsets else 1

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
        offset = packet.find(b"\0\0\1")
        while 0 <= offset < len(packet) - 4 and packet[offset + 3] not in _LAYER_CODES:
            if packet[offset + 3] == _VOP[3]:
                return
            offset = packet.find(b"\0\0\1", offset + 3)
        if not 0 <= offset < len(packet) - 4:
            return
        bits = _Bits(packet[offset + 4 : offset + 4 + MOST_HEADER_BYTES], padded=True)
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


_MPEG_1_2 = ("mpeg1video", "mpeg2video")
_B = 3
HEAD_BYTES = 4096  # headers and user data before that of the picture


@dataclass
class ShownOrder:
    """The order in which pictures of MPEG-1 and -2 come out: B pictures at once, others when the next one is stored.

    Program streams state few times. FFmpeg makes up the others, not always as the pictures come: two may get one time,
    and one that comes later an earlier one.

    ``ascends``: whether no timestamp is below that of a picture that comes out before. ``output_pts``: timestamps in
    the order in which pictures come out. Of other codecs nothing is known.
    """

    syntax: Syntax
    ascends: bool = True
    output_pts: list[int] = field(default_factory=list)
    _held: int | None = None

    def add(self, coded: memoryview, pts: int) -> None:
        """The next picture as stored."""
        if self.syntax.codec not in _MPEG_1_2:
            return
        if mpeg2_kind(bytes(coded[:HEAD_BYTES])) == _B:
            self._output(pts)
            return
        self.end()
        self._held = pts

    def end(self) -> None:
        """No picture follows that is shown before the last one."""
        if self._held is not None:
            self._output(self._held)

    def _output(self, pts: int) -> None:
        self.ascends &= not self.output_pts or pts >= self.output_pts[-1]
        self.output_pts.append(pts)

    def can_count_from(self, pts: int, shown: Sequence[int]) -> bool:
        """Whether the picture of a time comes out at its position among all times: counting may begin with it."""
        position = bisect_left(shown, pts)
        return self.ascends or (position < len(shown) and self.output_pts[position] == pts)

    def is_reference(self, coded: memoryview) -> bool:
        """Whether it is a picture of MPEG-1 or -2 behind which none is stored that is shown before those before it."""
        return self.syntax.codec in _MPEG_1_2 and mpeg2_kind(bytes(coded[:HEAD_BYTES])) in (1, 2)


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

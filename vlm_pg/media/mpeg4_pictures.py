"""How many frames a packet of MPEG-4 stands for: DivX and XviD in AVI store none, one or two pictures in one.

AVI gives every packet one time, that of its place. So that B-frames could lie there, encoders put one into the packet
of the picture before it ("packed"), and fill the place that is then left over with a picture that is not coded. The
same kind of picture elsewhere says that the one before it stays on display, and no decoder shows a frame for it. Of a
B-frame in the very last packet, behind which no place follows, FFmpeg's decoder shows nothing; it is no frame here.

Source: ISO/IEC 14496-2 6.2.3 (VideoObjectLayer), 6.2.5 (VideoObjectPlane).
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_pg.media.keyframes import Syntax

_VOP = b"\0\0\1\xb6"
_LAYER_CODES = range(0x20, 0x30)
_EXTENDED_ASPECT, _RECTANGULAR = 15, 0
# A picture that is not coded is a header alone. Of larger packets only start codes are looked for.
MOST_HEADER_BYTES = 64
MOST_PICTURES = 16


@dataclass
class Mpeg4Pictures:
    """Follows the packets of a stream of MPEG-4 part 2 as they are stored.

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
        while place >= 0 and len(places) < MOST_PICTURES:
            places.append(place + 4)
            place = packet.find(_VOP, place + 4)
        if not places:
            return 1
        return sum(self._is_coded(packet[place : place + MOST_HEADER_BYTES]) for place in places)

    def _is_coded(self, header: bytes) -> bool:
        """vop_coded of a picture's header behind its start code."""
        if not self.time_bits:
            return True
        bits = _Bits(header)
        bits.skip(2)  # vop_coding_type
        while bits.take(1):  # modulo_time_base
            pass
        bits.skip(1 + self.time_bits + 1)
        return bits.is_over or bool(bits.take(1))

    def _read_layer(self, packet: bytes) -> None:
        """How long times are, from the header of a video object layer, if there is one."""
        place = packet.find(b"\0\0\1")
        while 0 <= place < len(packet) - 4 and packet[place + 3] not in _LAYER_CODES:
            if packet[place + 3] == _VOP[3]:
                return
            place = packet.find(b"\0\0\1", place + 3)
        if not 0 <= place < len(packet) - 4:
            return
        bits = _Bits(packet[place + 4 : place + 4 + MOST_HEADER_BYTES])
        bits.skip(1 + 8)  # random_accessible_vol, video_object_type_indication
        if bits.take(1):  # is_object_layer_identifier
            bits.skip(4 + 3)
        if bits.take(4) == _EXTENDED_ASPECT:
            bits.skip(8 + 8)
        if bits.take(1):  # vol_control_parameters
            bits.skip(2 + 1)
            if bits.take(1):  # vbv_parameters
                bits.skip(79)
        shape = bits.take(2)
        bits.skip(1)
        resolution = bits.take(16)
        known = shape == _RECTANGULAR and resolution > 0 and not bits.is_over
        self.time_bits = max(1, (resolution - 1).bit_length()) if known else 0


class _Bits:
    """Bits from the first on; behind the last there are zeros."""

    def __init__(self, content: bytes):
        self._value, self._length, self._place = int.from_bytes(content, "big"), 8 * len(content), 0

    @property
    def is_over(self) -> bool:
        """Whether all bits were taken, or more."""
        return self._place >= self._length

    def take(self, count: int) -> int:
        """The next bits as a number."""
        self._place += count
        shift = self._length - self._place
        value = self._value >> shift if shift >= 0 else self._value << -shift
        return value & ((1 << count) - 1)

    def skip(self, count: int) -> None:
        """Leave some out."""
        self._place += count

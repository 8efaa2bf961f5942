"""In which order a decoder gives the pictures of MPEG-1 and -2, whatever the timestamps of their packets say.

Program streams state few times. FFmpeg makes up the others, not always as the pictures come: two may get one time, and
one that comes later an earlier one. Source: ITU-T H.262 6.1.1.11.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from vlm_pg.media.keyframes import Syntax, mpeg2_kind

_CODECS = ("mpeg1video", "mpeg2video")
_B = 3
HEAD_BYTES = 4096  # headers and user data before that of the picture


@dataclass
class ShownOrder:
    """Follows pictures as they are stored: B pictures come out at once, others when the next of these is stored.

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

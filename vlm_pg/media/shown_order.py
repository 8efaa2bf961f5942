"""In which order a decoder gives the pictures of MPEG-1 and -2, whatever the timestamps of their packets say.

Program streams state few times. FFmpeg makes up the others, not always as the pictures come: two may get one time, and
one that comes later an earlier one. Source: ITU-T H.262 6.1.1.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vlm_pg.media.keyframes import Syntax, mpeg2_kind

_CODECS = ("mpeg1video", "mpeg2video")
_B = 3
HEAD_BYTES = 4096  # headers and user data before that of the picture


@dataclass
class ShownOrder:
    """The timestamps as their pictures come out: B pictures at once, others when the next of these is stored."""

    syntax: Syntax
    _out: list[int] = field(default_factory=list)
    _held: int | None = None

    def add(self, coded: memoryview, pts: int) -> None:
        """The next picture as stored; of other codecs nothing is known."""
        if self.syntax.codec not in _CODECS:
            return
        if mpeg2_kind(bytes(coded[:HEAD_BYTES])) == _B:
            self._out.append(pts)
            return
        if self._held is not None:
            self._out.append(self._held)
        self._held = pts

    def agree(self, shown: Sequence[int]) -> set[int] | None:
        """The timestamps of those pictures before which all come that are shown before; None where that is all.

        Args:
            shown: the timestamps of all pictures that were added, ascending.
        """
        out = self._out if self._held is None else [*self._out, self._held]
        if not out or out == list(shown):
            return None
        sure, latest = set[int](), min(shown) - 1
        for come, expected in zip(out, shown, strict=True):
            if latest < come == expected:
                sure.add(come)
            latest = max(latest, come)
        return sure

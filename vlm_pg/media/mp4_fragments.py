"""Whether the fragments of an MP4 (moof) follow each other in time.

A fragment says when its first frame is decoded (tfdt) and how long its frames take (trun, tfhd, trex). In a gap before
the next fragment its last frame is held (ISO/IEC 14496-12 8.8.12). Where the next one begins before that frame is
decoded, one of them is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from vlm_pg.media.boundary import DecodeFailure

_BASE_OFFSET, _DESCRIPTION, _DEFAULT_DURATION = 1, 2, 8  # flags of tfhd
_DATA_OFFSET, _FIRST_FLAGS, _DURATIONS = 1, 4, 0x100  # flags of trun
_OF_SAMPLES = 0xF00  # each of these adds a field to every sample


@dataclass
class _Track:
    """In ticks. ``usual``: duration of a frame where its fragment states none, else ``duration``. ``latest``: when the
    last frame so far is decoded, ``next``: the one behind it. ``overlap``: such a time, and that of the first fragment
    that begins before it.
    """

    usual: int = 0
    duration: int = 0
    latest: int = 0
    next: int = 0
    overlap: tuple[int, int] | None = None


class Fragments:
    """Follows the boxes of fragments, in the order of the file."""

    def __init__(self) -> None:
        self._tracks: dict[int, _Track] = {}
        self._track = _Track()

    def read(self, file: BinaryIO, kind: bytes, start: int, end: int) -> None:
        """One box, with the bounds of its contents."""
        if kind not in (b"trex", b"tfhd", b"tfdt", b"trun"):
            return
        file.seek(start)
        data = file.read(end - start)
        flags, number = int.from_bytes(data[1:4], "big"), int.from_bytes(data[4:8], "big")
        if kind == b"trex":
            self._tracks[number] = _Track(usual=int.from_bytes(data[12:16], "big"))
        elif kind == b"tfhd":
            self._track = self._tracks.setdefault(number, _Track())
            place = 8 + 8 * bool(flags & _BASE_OFFSET) + 4 * bool(flags & _DESCRIPTION)
            stated = int.from_bytes(data[place : place + 4], "big")
            self._track.duration = stated if flags & _DEFAULT_DURATION else self._track.usual
        elif kind == b"tfdt":
            self._begin(int.from_bytes(data[4:12] if data[:1] == b"\1" else data[4:8], "big"))
        else:
            self._add(flags, number, data)

    def _begin(self, time: int) -> None:
        track = self._track
        if time < track.latest and track.overlap is None:
            track.overlap = track.latest, time
        track.latest = track.next = time

    def _add(self, flags: int, count: int, data: bytes) -> None:
        """The samples of a run (trun)."""
        track = self._track
        total, last = count * track.duration, track.duration
        if flags & _DURATIONS:
            width = 4 * (flags & _OF_SAMPLES).bit_count()
            place = 8 + 4 * bool(flags & _DATA_OFFSET) + 4 * bool(flags & _FIRST_FLAGS)
            count = min(count, max(0, len(data) - place) // width)
            samples = np.frombuffer(data[place : place + count * width], ">u4").reshape(count, width // 4)
            total, last = int(samples[:, 0].sum(dtype=np.uint64)), int(samples[-1, 0]) if count else 0
        if count:
            track.next += total
            track.latest = track.next - last

    def check(self, number: int, scale: int) -> None:
        """Refuse a track whose fragments overlap. Raises DecodeFailure."""
        if (track := self._tracks.get(number)) and track.overlap is not None:
            latest, time = (at / scale for at in track.overlap)
            raise DecodeFailure(
                "open",
                f"a fragment begins at {time:.3f} s (tfdt), and by its durations (trun, tfhd, trex) the one before it "
                f"has a frame at {latest:.3f} s, so its times cannot be trusted",
            )

"""Whether the times that an MP4 or QuickTime file states can be trusted: do they contradict each other?

A track's times are in ticks of its media header (mdhd), edit lists and lengths of tracks in those of the movie header
(mvhd). Where one is missing or 0 FFmpeg makes another one up and decodes all frames at wrong times. Other damage shows
where two statements of one length differ: of the media header, the durations of its frames (stts, with the offsets of
ctts), track header (tkhd), movie header and edit list (elst); and where a fragment (tfdt) begins before the frames of
the one before it (trun) are through. Source: ISO/IEC 14496-12 8.3.2.3, 8.6, 8.8.12.

What nothing contradicts is taken as stated: media in another unit of which an edit list shows a part, a gap between
fragments, all times of a fragmented file in another unit, a frame that is off by less than a frame or two.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.mp4_fragments import Fragments

_MOST_SCALE = 2**31 - 1
# Lengths that programs write agree but for a frame or two, and a tick for each frame; a tick may be a whole frame.
_FRAMES, _MOST_ROUNDING = 2, 0.05
_NORMAL_RATE = 1 << 16
_ENTRIES = 4096
_MEDIA, _HEADERS = "its media header (mdhd) states", "its track and movie headers state"
_NO_RUNS = np.zeros((0, 2), np.int64)


@dataclass
class _Track:
    """Of a track, lengths in ticks; 0 where unknown.

    ``edits``: segment durations, media times and rates of its edit list. ``durations``, ``offsets``: its frames in
    the order they are stored, as runs of (frames, ticks).
    """

    number: int = 0
    is_video: bool = False
    scale: int | None = None
    media: int = 0
    shown: int = 0
    edits: list[tuple[int, int, int]] = field(default_factory=list)
    durations: np.ndarray = field(default_factory=lambda: _NO_RUNS)
    offsets: np.ndarray = field(default_factory=lambda: _NO_RUNS)


class Clock:
    """Gathers the boxes about times, in the order of the file."""

    def __init__(self) -> None:
        self._tracks: list[_Track] = []
        self._scale, self._length, self._is_fragmented = 0, 0, False
        self._fragments = Fragments()

    def read(self, file: BinaryIO, kind: bytes, start: int, end: int) -> None:
        """One box, with the bounds of its contents."""
        if kind == b"trak":
            self._tracks.append(_Track())
        elif kind in (b"mvex", b"moof"):
            self._is_fragmented = True
        elif kind == b"mvhd":
            self._scale, self._length = _scale_and_length(_data(file, start, end, 32), 12)
        elif kind in _READERS and self._tracks:
            _READERS[kind](self._tracks[-1], file, start, end)
        else:
            self._fragments.read(file, kind, start, end)

    def check(self) -> None:
        """Refuse a file whose video has times in unknown units, or contradictory ones. Raises DecodeFailure."""
        for track in self._tracks:
            if not track.is_video:
                continue
            for name, scale in (("media header (mdhd)", track.scale or 0), ("movie header (mvhd)", self._scale)):
                if not 0 < scale <= _MOST_SCALE:
                    raise DecodeFailure(
                        "open", f"its {name} is missing or damaged, so the units of its times are not known"
                    )
            self._fragments.check(track.number, track.scale or 1)
            if not self._is_fragmented and track.media and track.durations[:, 0].any():
                self._check_lengths(track)

    def _check_lengths(self, track: _Track) -> None:
        assert track.scale
        count, *ticks = _lengths(track.durations, track.offsets)
        frames, stored, first, end, longest = (time / track.scale for time in ticks)
        media, shown, movie = track.media / track.scale, track.shown / self._scale, self._length / self._scale
        rounding = min(count / track.scale, _MOST_ROUNDING * frames) + 1 / self._scale
        slack = _FRAMES * frames / max(count, 1) + rounding
        empty = sum(length for length, time, _ in track.edits if time < 0) / self._scale
        # Programs count from 0, from the first frame as shown or as stored, with what is empty before it or without.
        lengths = [one + before for one in (frames, end, end - first, end - stored) for before in (0, empty)]
        if min(abs(media - one) for one in lengths) > slack:
            raise _contradiction(f"{_MEDIA} {media:.2f} s", "the durations of its frames (stts) add up to", frames)
        if end - first > max(media, frames) + max(slack, _FRAMES * longest):
            raise _contradiction(f"{_MEDIA} {media:.2f} s", "with their offsets (ctts) its frames take", end - first)
        stated = [one for one in (shown, movie) if one]
        if not track.edits:
            # where the track's length is not known that of the movie may be another one's
            if min(abs(media - one) for one in stated) > slack if shown else 0 < movie < media - slack:
                raise _contradiction(f"{_MEDIA} {media:.2f} s", _HEADERS, *stated)
            return
        self._check_edits(track, [one - empty for one in stated], end - min(first, 0), slack)

    def _check_edits(self, track: _Track, stated: list[float], end: float, slack: float) -> None:
        """``stated``: lengths without what comes before the first segment; ``end``: of what segments may show."""
        assert track.scale
        segments = [(length / self._scale, time / track.scale) for length, time, _ in track.edits if time >= 0]
        edited = sum(length for length, _ in segments)
        if track.shown and edited and all(one > edited + slack for one in stated):
            raise _contradiction(f"its edit list (elst) shows {edited:.2f} s", _HEADERS, *stated)
        # Several may show the same, and at another rate a segment takes another time than its media.
        if len(segments) == 1 and track.edits[-1][2] == _NORMAL_RATE:
            left = end - segments[0][1]
            if all(one > left + slack for one in (edited, *stated)):
                raise _contradiction(f"its edit list (elst) leaves {left:.2f} s", _HEADERS, *stated)


def _contradiction(one: str, other: str, *seconds: float) -> DecodeFailure:
    lengths = " and ".join(f"{length:.2f}" for length in seconds)
    return DecodeFailure("open", f"{one}, {other} {lengths} s, so its times cannot be trusted")


def _lengths(durations: np.ndarray, offsets: np.ndarray) -> tuple[float, ...]:
    """Number of frames; in ticks: all durations, when the one stored first is shown, the one shown first, when the last
    one has been, and the longest duration."""
    ends, until = np.cumsum(durations[:, 0]), np.cumsum(offsets[:, 0])
    stops = np.sort(np.concatenate((ends, until[until < ends[-1]])))  # where runs end that are alike in both
    stops = stops[np.diff(stops, prepend=0) > 0]
    starts = np.append(0, stops[:-1])
    ticks = durations[np.searchsorted(ends, starts, side="right"), 1].astype(float)
    shifts = np.append(offsets[:, 1], 0)[np.searchsorted(until, starts, side="right")]  # none: shown as decoded
    decoded = np.cumsum(ticks * (stops - starts))
    first, last = (decoded - ticks * (stops - starts) + shifts).min(), (decoded + shifts).max()
    return tuple(float(number) for number in (ends[-1], decoded[-1], shifts[0], first, last, ticks.max()))


def _data(file: BinaryIO, start: int, end: int, most: int) -> bytes:
    file.seek(start)
    return file.read(max(0, min(most, end - start)))


def _known(data: bytes) -> int:
    """A length; 0 where all bits say that it is not known."""
    return 0 if data.count(0xFF) == len(data) else int.from_bytes(data, "big")


def _scale_and_length(data: bytes, place: int) -> tuple[int, int]:
    """Of mvhd and mdhd: two dates of 4 or 8 bytes stand before them."""
    wide = 4 if data[:1] == b"\0" else 8
    place += (wide - 4) * 2
    return int.from_bytes(data[place : place + 4], "big"), _known(data[place + 4 : place + 4 + wide])


def _read_mdhd(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    track.scale, track.media = _scale_and_length(_data(file, start, end, 32), 12)


def _read_tkhd(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    data = _data(file, start, end, 36)
    is_narrow = data[:1] == b"\0"
    track.number = int.from_bytes(data[12:16] if is_narrow else data[20:24], "big")
    track.shown = _known(data[20:24] if is_narrow else data[28:36])


def _read_hdlr(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    track.is_video |= _data(file, start, end, 12)[8:] == b"vide"


def _read_elst(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    head = _data(file, start, end, 8)
    form = ">Iii" if head[:1] == b"\0" else ">Qqi"
    width = struct.calcsize(form)
    data = _data(file, start + 8, end, min(int.from_bytes(head[4:8], "big"), _ENTRIES) * width)
    track.edits = list(struct.iter_unpack(form, data[: len(data) // width * width]))


def _read_stts(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    track.durations = _runs(file, start, end, ">u4")


def _read_ctts(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    track.offsets = _runs(file, start, end, ">i4")


def _runs(file: BinaryIO, start: int, end: int, form: str) -> np.ndarray:
    count = int.from_bytes(_data(file, start, end, 8)[4:], "big")
    data = _data(file, start + 8, end, 8 * count)
    runs = np.frombuffer(data[: len(data) // 8 * 8], [("frames", ">u4"), ("ticks", form)])
    return np.stack([runs["frames"].astype(np.int64), runs["ticks"].astype(np.int64)], axis=1)


_READERS = {
    b"mdhd": _read_mdhd,
    b"tkhd": _read_tkhd,
    b"hdlr": _read_hdlr,
    b"elst": _read_elst,
    b"stts": _read_stts,
    b"ctts": _read_ctts,
}

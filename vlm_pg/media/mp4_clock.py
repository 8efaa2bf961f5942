"""Whether the units of time of an MP4 or QuickTime file can be trusted.

A track's times are in ticks of its media header (mdhd), edit lists and lengths of tracks in those of the movie header
(mvhd). Where one is missing or 0 FFmpeg makes another one up and decodes all frames at wrong times. A damaged one shows
where a track's length by its media header agrees neither with that in its track header (tkhd) nor with the movie's, or
not with the durations of its own frames (stts).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import BinaryIO

from vlm_pg.media.boundary import DecodeFailure

# Lengths that programs write agree but for a frame or two: a wrong unit is off by far more.
MOST_RATIO, SLACK_SECONDS = 1.2, 1.0
_MOST_SCALE = 2**31 - 1
_ENTRIES = 4096


@dataclass
class _Track:
    """Of a track, lengths in ticks; 0 where unknown. ``edits``: segment durations and media times of its edit list."""

    is_video: bool = False
    scale: int | None = None
    media: int = 0
    shown: int = 0
    frames: int = 0
    edits: list[tuple[int, int]] = field(default_factory=list)


class Clock:
    """Gathers the boxes about times, in the order of the file."""

    def __init__(self) -> None:
        self._tracks: list[_Track] = []
        self._scale, self._length, self._is_fragmented = 0, 0, False

    def read(self, file: BinaryIO, kind: bytes, start: int, end: int) -> None:
        """One box, with the bounds of its contents."""
        if kind == b"trak":
            self._tracks.append(_Track())
        elif kind in (b"mvex", b"moof"):
            self._is_fragmented = True
        elif kind == b"mvhd":
            self._scale, self._length = _scale_and_length(_data(file, start, end, 32), 12)
        elif self._tracks:
            _READERS.get(kind, lambda *_: None)(self._tracks[-1], file, start, end)

    def check(self) -> None:
        """Refuse a file whose video has times in unknown or contradictory units. Raises DecodeFailure."""
        for track in self._tracks:
            if not track.is_video:
                continue
            for name, scale in (("media header (mdhd)", track.scale or 0), ("movie header (mvhd)", self._scale)):
                if not 0 < scale <= _MOST_SCALE:
                    raise DecodeFailure(
                        "open",
                        f"its {name} is missing or damaged, so the units of its times are not known",
                    )
            if not self._is_fragmented and track.media:
                self._check_lengths(track)

    def _check_lengths(self, track: _Track) -> None:
        assert track.scale
        media = track.media / track.scale
        frames = track.frames / track.scale
        if frames and not _agree(media, frames):
            raise DecodeFailure(
                "open",
                f"its media header (mdhd) states {media:.1f} s and the durations of its frames (stts) add up to "
                f"{frames:.1f} s, so its times cannot be trusted",
            )
        stated = [length / self._scale for length in (track.shown, self._length) if length]
        if track.edits:
            # A part of the media may be shown, or several, also twice: only one that is longer than all contradicts.
            lengths = [length for length, time in track.edits if time >= 0]
            empty = sum(length for length, time in track.edits if time < 0) / self._scale
            stated = [lengths[0] / self._scale, *(one - empty for one in stated)] if len(lengths) == 1 else []
            contradicts = all(one > media * MOST_RATIO + SLACK_SECONDS for one in stated)
        else:
            contradicts = not any(_agree(media, one) for one in stated)
        if stated and contradicts:
            raise DecodeFailure(
                "open",
                f"its media header (mdhd) states {media:.1f} s, its track and movie headers "
                f"{' and '.join(f'{one:.1f}' for one in stated)} s, so its times cannot be trusted",
            )


def _agree(one: float, other: float) -> bool:
    return max(one, other) <= min(one, other) * MOST_RATIO + SLACK_SECONDS


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
    track.shown = _known(data[20:24] if data[:1] == b"\0" else data[28:36])


def _read_hdlr(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    track.is_video |= _data(file, start, end, 12)[8:] == b"vide"


def _read_elst(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    head = _data(file, start, end, 8)
    form = ">Iii" if head[:1] == b"\0" else ">Qqi"
    width = struct.calcsize(form)
    data = _data(file, start + 8, end, min(int.from_bytes(head[4:8], "big"), _ENTRIES) * width)
    entries = struct.iter_unpack(form, data[: len(data) // width * width])
    # At another rate than 1 a segment is shown for another time than its media takes: then nothing is compared.
    track.edits = [(length, time) for length, time, rate in entries if rate == 1 << 16 or time < 0] or [(0, 0)]


def _read_stts(track: _Track, file: BinaryIO, start: int, end: int) -> None:
    place, end = start + 8, min(end, start + 8 + 8 * int.from_bytes(_data(file, start, end, 8)[4:], "big"))
    while data := _data(file, place, end, _ENTRIES * 8):
        track.frames += sum(count * ticks for count, ticks in struct.iter_unpack(">II", data[: len(data) // 8 * 8]))
        place += _ENTRIES * 8


_READERS = {
    b"mdhd": _read_mdhd,
    b"tkhd": _read_tkhd,
    b"hdlr": _read_hdlr,
    b"elst": _read_elst,
    b"stts": _read_stts,
}

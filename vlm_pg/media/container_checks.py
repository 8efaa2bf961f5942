"""Tables of MP4, QuickTime and Matroska files, checked before FFmpeg opens them: how many frames, times that hold.

A few bytes of a sample table can promise billions of samples, and FFmpeg makes room for each of them when it opens the
file. A sample of video has bytes of its own; sound in old QuickTime files has up to six samples to a byte.

A track's times are in ticks of its media header (mdhd), edit lists and lengths of tracks in those of the movie header
(mvhd). Where one is missing or 0 FFmpeg makes another one up and decodes all frames at wrong times. Other damage shows
where two statements of one length differ: of the media header, the durations of its frames (stts, with the offsets of
ctts), track header (tkhd), movie header and edit list (elst); and where a fragment (tfdt) begins before the frames of
the one before it (trun) are through. Source: ISO/IEC 14496-12 8.3.2.3, 8.6, 8.8.12.

What nothing contradicts is taken as stated: media in another unit of which an edit list shows a part, a gap between
fragments, all times of a fragmented file in another unit, a frame that is off by less than a frame or two.

All times of Matroska are counted in one unit (TimestampScale), the stated length too, so that a damaged one contradicts
nothing but a checksum (CRC-32) over the head. FFmpeg adds one (not to WebM), mkvmerge none: then another unit is
another speed. All but sound alone is counted in milliseconds as a rule, and other damage in that element, such as of a
title, changes no time. Source: RFC 8794 11.3, RFC 9559 5.1.2.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from vlm_pg.media.boundary import DecodeFailure

_CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"mvex", b"moof", b"traf"}
MAX_BOXES = 1_000_000
SAMPLES_PER_BYTE = 8
_CHUNK_ENTRIES = 4096


def check_tables(file: BinaryIO, size_bytes: int) -> None:
    """Refuse tables that promise more samples than a file of this size can hold, and times in unknown units.

    Raises:
        DecodeFailure: they do, or hide in a compressed header.
    """
    fragments, clock = 0, Clock()
    for kind, start, end in _boxes(file, 0, size_bytes):
        if kind == b"cmov":
            raise DecodeFailure("its header is compressed, which is not read")
        clock.read(file, kind, start, end)
        count = _promised(file, kind, start, end)
        if kind == b"trun":
            fragments += count
            count = fragments
        if count > SAMPLES_PER_BYTE * size_bytes:
            raise DecodeFailure(f"its tables promise {count} samples in a file of {size_bytes} bytes")
    clock.check()


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """All boxes that can hold tables, in their order, with the bounds of their contents."""
    stack = [(start, end)]
    seen = 0
    while stack:
        start, end = stack.pop()
        if end - start < 8:
            continue
        file.seek(start)
        head = file.read(16)
        if len(head) < 8:
            continue
        size, kind, begins = int.from_bytes(head[:4], "big"), head[4:8], start + 8
        if size == 1 and len(head) == 16:
            size, begins = int.from_bytes(head[8:16], "big"), start + 16
        stop = end if size == 0 else start + size
        if stop < begins:  # FFmpeg stops reading here as well
            continue
        seen += 1
        if seen > MAX_BOXES:
            raise DecodeFailure(f"it has more than {MAX_BOXES} boxes")
        stack.append((stop, end))
        if kind in _CONTAINERS:
            stack.append((begins, min(stop, end)))
        yield kind, begins, min(stop, end)


def _promised(file: BinaryIO, kind: bytes, start: int, end: int) -> int:
    """The number of samples that one box promises; 0 for boxes that promise none."""
    if kind in (b"stsz", b"stz2"):  # version and flags, size of every sample, number
        return int.from_bytes(_data(file, start + 8, start + 12, 4), "big")
    if kind not in (b"trun", b"stts", b"ctts"):
        return 0
    count = int.from_bytes(_data(file, start + 4, start + 8, 4), "big")  # behind version and flags
    if kind == b"trun":
        return count
    left, total = min(count, max(0, end - start - 8) // 8), 0
    file.seek(start + 8)
    while left and (whole := len(data := file.read(min(left, _CHUNK_ENTRIES) * 8)) // 8):
        total += sum(samples for samples, _ in struct.iter_unpack(">II", data[: whole * 8]))
        left -= whole
    return total


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

    def read(self, file: BinaryIO, kind: bytes, start: int, end: int) -> None:
        """One box of the track."""
        head = _data(file, start, end, 36)
        is_narrow = head[:1] == b"\0"
        if kind == b"stts":
            self.durations = _runs(file, start, end, ">u4")
        elif kind == b"ctts":
            self.offsets = _runs(file, start, end, ">i4")
        elif kind == b"hdlr":
            self.is_video |= head[8:12] == b"vide"
        elif kind == b"mdhd":
            self.scale, self.media = _scale_and_length(head[:32])
        elif kind == b"tkhd":
            self.number = int.from_bytes(head[12:16] if is_narrow else head[20:24], "big")
            self.shown = _known(head[20:24] if is_narrow else head[28:36])
        elif kind == b"elst":
            form = ">Iii" if is_narrow else ">Qqi"
            width = struct.calcsize(form)
            data = _data(file, start + 8, end, min(int.from_bytes(head[4:8], "big"), _ENTRIES) * width)
            self.edits = list(struct.iter_unpack(form, data[: len(data) // width * width]))


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
            self._scale, self._length = _scale_and_length(_data(file, start, end, 32))
        elif kind in (b"trex", b"tfhd", b"tfdt", b"trun"):
            self._fragments.read(kind, _data(file, start, end, end - start))
        elif self._tracks:
            self._tracks[-1].read(file, kind, start, end)

    def check(self) -> None:
        """Refuse a file whose video has times in unknown units, or contradictory ones. Raises DecodeFailure."""
        for track in self._tracks:
            if not track.is_video:
                continue
            for name, scale in (("media header (mdhd)", track.scale or 0), ("movie header (mvhd)", self._scale)):
                if not 0 < scale <= _MOST_SCALE:
                    raise DecodeFailure(f"its {name} is missing or damaged, so the units of its times are not known")
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
    return DecodeFailure(f"{one}, {other} {lengths} s, so its times cannot be trusted")


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


def _scale_and_length(data: bytes) -> tuple[int, int]:
    """Of mvhd and mdhd: two dates of 4 or 8 bytes stand before them."""
    width = 4 if data[:1] == b"\0" else 8
    offset = 4 + 2 * width
    return int.from_bytes(data[offset : offset + 4], "big"), _known(data[offset + 4 : offset + 4 + width])


def _runs(file: BinaryIO, start: int, end: int, form: str) -> np.ndarray:
    count = int.from_bytes(_data(file, start, end, 8)[4:], "big")
    data = _data(file, start + 8, end, 8 * count)
    runs = np.frombuffer(data[: len(data) // 8 * 8], [("frames", ">u4"), ("ticks", form)])
    return np.stack([runs["frames"].astype(np.int64), runs["ticks"].astype(np.int64)], axis=1)


_BASE_OFFSET, _DESCRIPTION, _DEFAULT_DURATION = 1, 2, 8  # flags of tfhd
_DATA_OFFSET, _FIRST_FLAGS, _DURATIONS = 1, 4, 0x100  # flags of trun
_OF_SAMPLES = 0xF00  # each of these adds a field to every sample


@dataclass
class _FragmentTrack:
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
    """Follows the boxes of fragments (moof), in the order of the file: do they follow each other in time?

    A fragment says when its first frame is decoded (tfdt) and how long its frames take (trun, tfhd, trex). In a gap
    before the next fragment its last frame is held (ISO/IEC 14496-12 8.8.12). Where the next one begins before that
    frame is decoded, one of them is wrong.
    """

    def __init__(self) -> None:
        self._tracks: dict[int, _FragmentTrack] = {}
        self._track = _FragmentTrack()

    def read(self, kind: bytes, data: bytes) -> None:
        """One box (trex, tfhd, tfdt, trun)."""
        flags, number = int.from_bytes(data[1:4], "big"), int.from_bytes(data[4:8], "big")
        if kind == b"trex":
            self._tracks[number] = _FragmentTrack(usual=int.from_bytes(data[12:16], "big"))
        elif kind == b"tfhd":
            self._track = self._tracks.setdefault(number, _FragmentTrack())
            offset = 8 + 8 * bool(flags & _BASE_OFFSET) + 4 * bool(flags & _DESCRIPTION)
            stated = int.from_bytes(data[offset : offset + 4], "big")
            self._track.duration = stated if flags & _DEFAULT_DURATION else self._track.usual
        elif kind == b"tfdt":
            track, time = self._track, int.from_bytes(data[4:12] if data[:1] == b"\1" else data[4:8], "big")
            if time < track.latest and track.overlap is None:
                track.overlap = track.latest, time
            track.latest = track.next = time
        else:
            self._add_run(flags, number, data)

    def _add_run(self, flags: int, count: int, data: bytes) -> None:
        """The samples of a run (trun)."""
        track = self._track
        total, last = count * track.duration, track.duration
        if flags & _DURATIONS:
            width = 4 * (flags & _OF_SAMPLES).bit_count()
            offset = 8 + 4 * bool(flags & _DATA_OFFSET) + 4 * bool(flags & _FIRST_FLAGS)
            count = min(count, max(0, len(data) - offset) // width)
            samples = np.frombuffer(data[offset : offset + count * width], ">u4").reshape(count, width // 4)
            total, last = int(samples[:, 0].sum(dtype=np.uint64)), int(samples[-1, 0]) if count else 0
        if count:
            track.next += total
            track.latest = track.next - last

    def check(self, number: int, scale: int) -> None:
        """Refuse a track whose fragments overlap. Raises DecodeFailure."""
        if (track := self._tracks.get(number)) and track.overlap is not None:
            latest, time = (at / scale for at in track.overlap)
            raise DecodeFailure(
                f"a fragment begins at {time:.3f} s (tfdt), and by its durations (trun, tfhd, trex) the one before it "
                f"has a frame at {latest:.3f} s, so its times cannot be trusted"
            )


_SEGMENT, _INFO, _CLUSTER = 0x18538067, 0x1549A966, 0x1F43B675
_CRC = b"\xbf\x84"
_MILLISECONDS = b"\x2a\xd7\xb1\x83" + (1_000_000).to_bytes(3, "big")
_MOST_ELEMENTS, _MOST_BYTES = 1000, 1 << 20


def check_unit(file: BinaryIO, size_bytes: int) -> None:
    """Refuse a file with an unusual unit of time and a wrong checksum over it. Raises DecodeFailure."""
    offset = 0
    for _ in range(_MOST_ELEMENTS):
        if offset >= size_bytes:
            return
        file.seek(offset)
        kind, size, begins = _element(file.read(12))
        if kind == _CLUSTER or not begins:
            return
        offset += begins if kind == _SEGMENT else begins + size
        if kind == _INFO and size <= _MOST_BYTES:
            file.seek(offset - size)
            data = file.read(size)
            is_wrong = data.startswith(_CRC) and zlib.crc32(data[6:]) != int.from_bytes(data[2:6], "little")
            if is_wrong and _MILLISECONDS not in data:
                raise DecodeFailure(
                    "its unit of time (TimestampScale) is unusual and the checksum over it (Info) is wrong, so its "
                    "times cannot be trusted"
                )
            return


def _element(data: bytes) -> tuple[int, int, int]:
    """Id, size and the length of both; a length of 0 where there is no element."""
    width = 9 - data[0].bit_length() if data else 9
    wide = 9 - data[width].bit_length() if width < len(data) else 9
    if width > 4 or wide > 8 or len(data) < width + wide:
        return 0, 0, 0
    size = int.from_bytes(data[width : width + wide], "big") & ((1 << 7 * wide) - 1)
    return int.from_bytes(data[:width], "big"), size, width + wide

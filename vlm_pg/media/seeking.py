"""PyAV: from wanted frames to pictures. Enter the stream where decoding may start, go forward, check every step.

A seek is believed only when the packet it leads to is the entry point that was requested. Containers without an index
(MPEG-TS, MPEG-PS) and damaged ones lead elsewhere; then the file is read from its start until that packet comes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import open_video
from vlm_pg.media.index import EntryPoint, VideoIndex, packets
from vlm_pg.media.upright import Opacity, upright

# decoders that show nothing until all of it is right, so that they may begin at any packet
CAREFUL_CODECS = ("h264", "hevc")
# Decoders hold back up to 16 frames to put them in order (H.264 A.3.1, H.265 A.4.2); a group of so many and the next
MOST_HELD = 32

Keep = Callable[[int, Any], None]


class FrameTooLarge(DecodeFailure):
    """A picture is larger than allowed, whatever the header states."""


@dataclass(frozen=True)
class Run:
    """Wanted positions in the index, ascending, that follow the same entry point (None: there is none before them).

    ``by_order``: whether times do not tell these frames apart from others.
    """

    entry: EntryPoint | None
    wanted: tuple[int, ...]
    by_order: bool = False


class PyAVDecoder:
    """PyAV: every codec of a current FFmpeg. Decodes forward from the entry point before each wanted frame.

    Every frame is known by its timestamp, or by its order where timestamps do not tell, and a damaged one between entry
    point and wanted frame is a failure, so what comes is what was requested, or nothing.

    ``max_pixels``: the largest area of a picture; streams may change size midway. 0 for no limit.
    """

    name = "pyav"

    def __init__(self, path: Path, index: VideoIndex, max_pixels: int = 0):
        from av.video.reformatter import VideoReformatter

        self._path, self._index, self._max_pixels = path, index, max_pixels
        self._scaler, self._opacity = VideoReformatter(), Opacity(path, max_pixels)
        self._pictures: dict[int, np.ndarray] = {}

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``. Raises FrameTooLarge: a picture has more than ``max_pixels``."""
        self._pictures = {}
        with open_video(self._path, self._max_pixels) as (container, stream), _decoding():
            late = [run for run in runs(self._index, indices) if not self._seek(container, stream, run)]
        for run in late:
            self._read_from_start(run)
        pictures, self._pictures = self._pictures, {}
        return np.stack([pictures[position] for position in indices])

    def _seek(self, container: Any, stream: Any, run: Run) -> bool:
        """Read a run from its entry point on; False where that, or a wanted frame, does not come."""
        import av

        if run.entry is None:
            return False
        try:
            container.seek(run.entry.dts, stream=stream, backward=True)
        except av.FFmpegError:  # an AVI whose index flags no picture so early
            return False
        coded = _enter(packets(container, stream), run.entry)
        return coded is not None and self._decode(coded, run)

    def _read_from_start(self, run: Run) -> None:
        """Without any seek: from the entry point, and, should frames not come, from the first packet."""
        if run.entry is not None:
            with open_video(self._path, self._max_pixels) as (container, stream), _decoding():
                coded = _enter(packets(container, stream), run.entry)
                if coded is not None and self._decode(coded, run):
                    return
        with open_video(self._path, self._max_pixels) as (container, stream), _decoding():
            is_careful = stream.codec_context.codec.canonical_name in CAREFUL_CODECS
            may_begin = run.entry is not None or is_careful or self._index.starts_at_entry
            whole = replace(run, entry=None) if run.by_order else run
            if may_begin and self._decode(packets(container, stream), whole):
                return
        seconds = float(self._index.pts[self._missing(run)[0]] * self._index.time_base)
        if run.by_order:
            raise DecodeFailure(f"from {seconds:.3f} s on neither times nor order tell which frame is which")
        raise DecodeFailure(f"no frame comes at {seconds:.3f} s")

    def _decode(self, coded: Iterator[Any], run: Run) -> bool:
        """Put the wanted frames into ``_pictures``; False as soon as one of them cannot come any more."""
        pts, found = self._index.pts, dict[int, np.ndarray]()

        def keep(position: int, frame: Any) -> None:
            like = next(iter((self._pictures or found).values()), None)
            found[position] = upright(frame, like, self._scaler, self._opacity)

        if run.by_order:
            first = 0 if run.entry is None else bisect_left(pts, run.entry.pts)
            if keep_by_order(self._checked(coded, pts[first]), pts, first, run.wanted, keep):
                self._pictures |= found
        elif left := self._missing(run):
            start = pts[left[0]] if run.entry is None else run.entry.pts
            keep_by_time(self._checked(coded, start), pts, start, left, keep)
            self._pictures |= found
        return not self._missing(run)

    def _missing(self, run: Run) -> list[int]:
        return [position for position in run.wanted if position not in self._pictures]

    def _checked(self, coded: Iterator[Any], start: int) -> Iterator[Any]:
        """Decoded frames from a time on. A damaged one is the end: those behind it are made from it."""
        for frame in chain.from_iterable(packet.decode() for packet in coded):
            if frame.pts is None or frame.pts < start:
                continue
            if frame.is_corrupt:
                raise DecodeFailure(f"the frame at {frame.time:.3f} s is damaged")
            if 0 < self._max_pixels < frame.width * frame.height:
                raise FrameTooLarge(f"the frame at {frame.time:.3f} s has {frame.width}x{frame.height} pixels")
            yield frame


def runs(index: VideoIndex, wanted: Sequence[int]) -> list[Run]:
    """One run of decoding for all wanted positions that follow the same entry point."""
    starts = [entry.pts for entry in index.entries]
    found = []
    for number, group in groupby(wanted, key=lambda position: bisect_right(starts, index.pts[position]) - 1):
        positions = tuple(sorted(set(group)))
        by_order = not index.times_hold or any(map(index.shares_its_time, positions))
        found.append(Run(index.entries[number] if number >= 0 else None, positions, by_order))
    return found


def _decoding() -> AbstractContextManager[None]:
    import av

    return reading((av.FFmpegError,))


def _enter(coded: Iterator[Any], entry: EntryPoint) -> Iterator[Any] | None:
    """The packets from the entry point on; None where it does not come."""
    for packet in coded:
        if packet.is_keyframe and packet.pts == entry.pts:
            return chain((packet,), coded)
        if packet.dts is not None and packet.dts > entry.dts:
            return None
    return None


def keep_by_time(frames: Iterable[Any], pts: Sequence[int], start: int, wanted: Sequence[int], keep: Keep) -> bool:
    """Pass the wanted frames to ``keep``, each known by its time.

    Args:
        frames: as they come out of the decoder, from time ``start`` on.
        wanted: positions in the index's ``pts``, ascending, each of a time of its own.

    Returns:
        False as soon as one of them cannot come any more.

    Raises:
        DecodeFailure: a frame comes behind one that is shown later. Where frames were missing on the way, that is
            looked for behind the wanted ones too.
    """
    left = list(wanted)
    expected, latest, has_gap, beyond = bisect_left(pts, start), start, False, 0
    for frame in frames:
        if frame.pts < latest:
            raise DecodeFailure(f"frames come in another order than their times, as at {frame.time:.3f} s")
        latest = frame.pts
        has_gap |= bisect_left(pts, latest) > expected
        expected = max(expected, bisect_left(pts, latest)) + 1  # the second of two of one time is still to come
        if left and latest > pts[left[0]]:
            return False
        if left and latest == pts[left[0]]:
            keep(left.pop(0), frame)
        if not left:
            if not has_gap or beyond == MOST_HELD:
                return True
            beyond += 1
    return not left


def keep_by_order(frames: Iterable[Any], pts: Sequence[int], first: int, wanted: Sequence[int], keep: Keep) -> bool:
    """As ``keep_by_time``, each frame known by how many have come before it.

    The frames up to a position are all there when their times are those of the index up to that position. That counts
    for the positions before it: decoding may have begun with a picture behind which some are stored that are shown
    before it and are left out, which shows by the position next to it.

    ``first``: the position of the first frame. ``wanted`` may be of one time.
    """
    chosen, last, latest = set(wanted), len(pts) - 1, None
    for position, frame in enumerate(frames, first):
        if position > min(last, wanted[-1] + MOST_HELD):
            return False
        latest = frame.pts if latest is None else max(latest, frame.pts)
        if position in chosen:
            keep(position, frame)
        if latest == pts[position] and (position == last or (pts[position + 1] > latest and position > wanted[-1])):
            return True
    return False

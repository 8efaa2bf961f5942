"""From wanted timestamps to pictures: enter the stream where decoding may start, go forward, check every step.

A seek is believed only when the packet it leads to is the entry point that was asked for. Containers without an index
(MPEG-TS, MPEG-PS) and damaged ones lead elsewhere; then the file is read from its start until that packet comes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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


@dataclass(frozen=True)
class Run:
    """Wanted places in the index, ascending, that follow the same entry point (None: there is none before them).

    ``by_order``: whether times do not tell these frames apart from others.
    """

    entry: EntryPoint | None
    wanted: tuple[int, ...]
    by_order: bool = False


class FrameTooLarge(DecodeFailure):
    """A picture is larger than allowed, whatever the header states."""


def runs(index: VideoIndex, wanted: Sequence[int]) -> list[Run]:
    """One run of decoding for all wanted places that follow the same entry point."""
    starts = [entry.pts for entry in index.entries]
    found = []
    for at, group in groupby(wanted, key=lambda place: bisect_right(starts, index.pts[place]) - 1):
        places = tuple(sorted(set(group)))
        by_order = not index.times_hold or any(index.shares_its_time(place) for place in places)
        found.append(Run(index.entries[at] if at >= 0 else None, places, by_order))
    return found


class _Reader:
    """Reads runs of an index into ``pictures``, by their places."""

    def __init__(self, path: Path, index: VideoIndex, max_pixels: int, opacity: Opacity):
        from av.video.reformatter import VideoReformatter

        self.path, self.index, self.max_pixels = path, index, max_pixels
        self.pictures: dict[int, np.ndarray] = {}
        self._scaler, self._opacity = VideoReformatter(), opacity

    def seek(self, container: Any, stream: Any, run: Run) -> bool:
        """Read a run from its entry point on; False where that, or a wanted frame, does not come."""
        import av

        if run.entry is None:
            return False
        try:
            container.seek(run.entry.dts, stream=stream, backward=True)
        except av.FFmpegError:  # an AVI whose index flags no picture so early
            return False
        coded = _enter(packets(container, stream), run.entry)
        return coded is not None and self.keep(coded, run)

    def read_from_start(self, run: Run) -> None:
        """Without any seek: from the entry point, and, should frames not come, from the first packet."""
        if run.entry is not None:
            with open_video(self.path, self.max_pixels) as (container, stream), _decoding():
                coded = _enter(packets(container, stream), run.entry)
                if coded is not None and self.keep(coded, run):
                    return
        with open_video(self.path, self.max_pixels) as (container, stream), _decoding():
            is_careful = stream.codec_context.codec.canonical_name in CAREFUL_CODECS
            may_begin = run.entry is not None or is_careful or self.index.starts_at_entry
            whole = replace(run, entry=None) if run.by_order else run
            if may_begin and self.keep(packets(container, stream), whole):
                return
        seconds = float(self.index.pts[self.missing(run)[0]] * self.index.time_base)
        if run.by_order:
            raise DecodeFailure("decode", f"from {seconds:.3f} s on neither times nor order tell which frame is which")
        raise DecodeFailure("decode", f"no frame comes at {seconds:.3f} s")

    def keep(self, coded: Iterator[Any], run: Run) -> bool:
        """Put the wanted frames into ``pictures``; False as soon as one of them cannot come any more."""
        pts, found = self.index.pts, dict[int, np.ndarray]()

        def keep(place: int, frame: Any) -> None:
            like = next(iter((self.pictures or found).values()), None)
            found[place] = upright(frame, like, self._scaler, self._opacity)

        if run.by_order:
            first = 0 if run.entry is None else bisect_left(pts, run.entry.pts)
            frames = _sound(_frames(coded), pts[first], self.max_pixels)
            if keep_by_order(frames, pts, first, run.wanted, keep):
                self.pictures |= found
        elif left := self.missing(run):
            start = pts[left[0]] if run.entry is None else run.entry.pts
            keep_by_time(_sound(_frames(coded), start, self.max_pixels), pts, start, left, keep)
            self.pictures |= found
        return not self.missing(run)

    def missing(self, run: Run) -> list[int]:
        """The wanted places whose pictures have not come."""
        return [place for place in run.wanted if place not in self.pictures]


def read_pictures(
    path: Path, index: VideoIndex, wanted: Sequence[int], max_pixels: int, opacity: Opacity
) -> dict[int, np.ndarray]:
    """Upright pictures, uint8 [height, width, 3], by their places in the index.

    ``opacity``: the file's, which one reading finds out for those that follow.

    Raises:
        DecodeFailure: one of them does not come, or comes damaged, or nothing tells which it is.
        FrameTooLarge: a picture has more than ``max_pixels``; 0 for no limit.
    """
    reader = _Reader(path, index, max_pixels, opacity)
    with open_video(path, max_pixels) as (container, stream), _decoding():
        late = [run for run in runs(index, wanted) if not reader.seek(container, stream, run)]
    for run in late:
        reader.read_from_start(run)
    return reader.pictures


def _decoding() -> Any:
    import av

    return reading("decode", (av.FFmpegError,))


def _enter(coded: Iterator[Any], entry: EntryPoint) -> Iterator[Any] | None:
    """The packets from the entry point on; None where it does not come."""
    for packet in coded:
        if packet.is_keyframe and packet.pts == entry.pts:
            return chain((packet,), coded)
        if packet.dts is not None and packet.dts > entry.dts:
            return None
    return None


def _frames(coded: Iterator[Any]) -> Iterator[Any]:
    for packet in coded:
        yield from packet.decode()


def _sound(frames: Iterator[Any], start: int, max_pixels: int) -> Iterator[Any]:
    """The frames from a time on. A damaged one is the end: those behind it are made from it."""
    for frame in frames:
        if frame.pts is None or frame.pts < start:
            continue
        if frame.is_corrupt:
            raise DecodeFailure("decode", f"the frame at {frame.time:.3f} s is damaged")
        if 0 < max_pixels < frame.width * frame.height:
            raise FrameTooLarge("decode", f"the frame at {frame.time:.3f} s has {frame.width}x{frame.height} pixels")
        yield frame


# Decoders hold back up to 16 frames to put them in order (H.264 A.3.1, H.265 A.4.2); a group of so many and the next
MOST_HELD = 32

Keep = Callable[[int, Any], None]


def keep_by_time(frames: Iterable[Any], pts: Sequence[int], start: int, wanted: Sequence[int], keep: Keep) -> bool:
    """Hand the wanted frames to ``keep``, each known by its time.

    Args:
        frames: as they come out of the decoder, from time ``start`` on.
        pts: the index's.
        start: the first time that is expected.
        wanted: places in ``pts``, ascending, each of a time of its own.
        keep: takes a place and its frame.

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
            raise DecodeFailure("decode", f"frames come in another order than their times, as at {frame.time:.3f} s")
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

    The frames up to a place are all there when their times are those of the index up to that place. That counts for
    the places before it: decoding may have begun with a picture behind which some are stored that are shown before it
    and are left out, which shows by the place next to it.

    Args:
        first: the place of the first frame.
        frames, pts, wanted, keep: as in ``keep_by_time``; ``wanted`` may be of one time.
    """
    chosen, last, latest = set(wanted), len(pts) - 1, None
    for place, frame in enumerate(frames, first):
        if place > min(last, wanted[-1] + MOST_HELD):
            return False
        latest = frame.pts if latest is None else max(latest, frame.pts)
        if place in chosen:
            keep(place, frame)
        if latest == pts[place] and (place == last or (pts[place + 1] > latest and place > wanted[-1])):
            return True
    return False

"""From wanted timestamps to pictures: enter the stream where decoding may start, go forward, check every step.

A seek is believed only when the packet it leads to is the entry point that was asked for. Containers without an index
(MPEG-TS, MPEG-PS) and damaged ones lead elsewhere; then the file is read from its start until that packet comes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import open_video
from vlm_pg.media.index import EntryPoint, VideoIndex, packets

# decoders that show nothing until all of it is right, so that they may begin at any packet
CAREFUL_CODECS = ("h264", "hevc")


@dataclass(frozen=True)
class Run:
    """Wanted timestamps, ascending, that follow the same entry point (None: there is none before them)."""

    entry: EntryPoint | None
    wanted: tuple[int, ...]


class FrameTooLarge(DecodeFailure):
    """A picture is larger than allowed, whatever the header states."""


def runs(index: VideoIndex, wanted: Sequence[int]) -> list[Run]:
    """One run of decoding for all wanted frames that follow the same entry point."""
    starts = [entry.pts for entry in index.entries]
    return [
        Run(index.entries[place] if place >= 0 else None, tuple(sorted(set(group))))
        for place, group in groupby(wanted, key=lambda pts: bisect_right(starts, pts) - 1)
    ]


def read_pictures(path: Path, index: VideoIndex, wanted: Sequence[int], max_pixels: int) -> dict[int, np.ndarray]:
    """Upright pictures, uint8 [height, width, 3], by their timestamps.

    Raises:
        DecodeFailure: one of them does not come, or comes damaged.
        FrameTooLarge: a picture has more than ``max_pixels``; 0 for no limit.
    """
    from av.video.reformatter import VideoReformatter

    pictures: dict[int, np.ndarray] = {}
    scaler = VideoReformatter()
    late: list[Run] = []
    with open_video(path, max_pixels) as (container, stream), _decoding():
        for run in runs(index, wanted):
            if run.entry is None:
                late.append(run)
                continue
            container.seek(run.entry.dts, stream=stream, backward=True)
            coded = _enter(packets(container, stream), run.entry)
            if coded is None or not _keep(_frames(coded), run, pictures, max_pixels, scaler):
                late.append(run)
    for run in late:
        _read_from_start(path, index, run, pictures, max_pixels, scaler)
    return pictures


def _read_from_start(
    path: Path, index: VideoIndex, run: Run, pictures: dict[int, np.ndarray], max_pixels: int, scaler: Any
) -> None:
    """Without any seek: from the entry point, and, should frames not come, from the first packet."""
    attempts: list[Callable[[Iterator[Any]], Iterator[Any] | None]] = [lambda coded: coded]
    if run.entry is not None:
        entry = run.entry
        attempts.insert(0, lambda coded: _enter(coded, entry))
    for enter in attempts:
        with open_video(path, max_pixels) as (container, stream), _decoding():
            if run.entry is None and stream.codec_context.codec.canonical_name not in CAREFUL_CODECS:
                break
            coded = enter(packets(container, stream))
            if coded is not None and _keep(_frames(coded), run, pictures, max_pixels, scaler):
                return
    missing = next(pts for pts in run.wanted if pts not in pictures)
    raise DecodeFailure("decode", f"no frame comes at {float(missing * index.time_base):.3f} s")


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


def _keep(frames: Iterator[Any], run: Run, pictures: dict[int, np.ndarray], max_pixels: int, scaler: Any) -> bool:
    """Put the wanted frames into ``pictures``; False as soon as one of them cannot come any more.

    A damaged frame on the way is an end too: those behind it are made from it.
    """
    left = [pts for pts in run.wanted if pts not in pictures]
    if not left:
        return True
    first = left[0] if run.entry is None else run.entry.pts
    for frame in frames:
        if frame.pts is None or frame.pts < first:
            continue
        if frame.is_corrupt:
            raise DecodeFailure("decode", f"the frame at {frame.time:.3f} s is damaged")
        if 0 < max_pixels < frame.width * frame.height:
            raise FrameTooLarge("decode", f"the frame at {frame.time:.3f} s has {frame.width}x{frame.height} pixels")
        if frame.pts < left[0]:
            continue
        if frame.pts > left[0]:
            return False
        pictures[left.pop(0)] = _upright(frame, next(iter(pictures.values()), None), scaler)
        if not left:
            return True
    return False


def _upright(frame: Any, like: np.ndarray | None, scaler: Any) -> np.ndarray:
    """The frame as uint8 [height, width, 3], turned as its metadata ask, in the size of ``like`` if given.

    ``scaler``: FFmpeg's, one for all frames; making one takes longer than a small picture.
    """
    turns = round(frame.rotation / 90) % 4
    size: dict[str, int] = {}
    if like is not None:  # streams may change size midway; the reader of the frames expects one size
        height, width = like.shape[:2] if turns % 2 == 0 else like.shape[1::-1]
        size = {"height": height, "width": width}
    return np.ascontiguousarray(np.rot90(scaler.reformat(frame, format="rgb24", threads=1, **size).to_ndarray(), turns))

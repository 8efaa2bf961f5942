"""What a video file says about itself without decoding: its header, and the index of its frames."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any


class DecodeFailure(Exception):
    """A file could not be read. ``stage`` is "open" or "decode"."""

    def __init__(self, stage: str, message: str):
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class VideoHeader:
    """What the container states. The size is before rotation; 0 stands for "not stated"."""

    width: int
    height: int
    duration_seconds: float
    stated_fps: float
    codec: str


@dataclass(frozen=True)
class VideoIndex:
    """The frames of a video, from the timestamps of its packets.

    ``pts``: presentation timestamp of every shown frame, ascending, in units of ``time_base`` seconds.
    ``key_pts``: those of the key frames, where decoding may start, ascending.
    ``key_places_agree``: whether every key frame is, say, the tenth frame both as stored and as shown. In streams with
    open groups of pictures it is not, and a decoder that takes the one for the other returns neighbouring frames.
    """

    pts: tuple[int, ...]
    key_pts: tuple[int, ...]
    time_base: Fraction
    key_places_agree: bool

    @property
    def pts_seconds(self) -> list[float]:
        """Presentation time of every frame, ascending."""
        return [float(pts * self.time_base) for pts in self.pts]


def open_video(path: Path) -> tuple[Any, Any]:
    """The container and the video stream FFmpeg calls best (largest, default), to be decoded by one thread."""
    import av

    try:
        container = av.open(str(path))
    except av.FFmpegError as error:
        raise DecodeFailure("open", str(error)) from error
    stream = container.streams.best("video")
    if stream is None:
        container.close()
        raise DecodeFailure("open", "the file has no video stream")
    stream.codec_context.thread_count = 1
    return container, stream


def read_header(path: Path) -> VideoHeader:
    """The header of a video file. Raises DecodeFailure when it is not a video."""
    container, stream = open_video(path)
    with container:
        durations = [0.0]
        if container.duration:
            durations.append(container.duration / 1_000_000)
        if stream.duration and stream.time_base:
            durations.append(float(stream.duration * stream.time_base))
        return VideoHeader(
            width=stream.width or 0,
            height=stream.height or 0,
            duration_seconds=max(durations),
            stated_fps=float(stream.average_rate or 0),
            codec=stream.codec_context.codec.canonical_name,
        )


def read_index(path: Path) -> VideoIndex:
    """Read through the file without decoding. Raises DecodeFailure when there is no usable frame."""
    import av

    container, stream = open_video(path)
    packets: list[tuple[int, bool]] = []
    try:
        with container:
            for packet in container.demux(stream):
                if packet.size == 0 or packet.is_discard:  # end marker; frames cut away by an edit list
                    continue
                if packet.pts is None:
                    raise DecodeFailure("open", "a frame has no presentation timestamp")
                packets.append((packet.pts, packet.is_keyframe))
            time_base = stream.time_base
    except av.FFmpegError as error:
        raise DecodeFailure("open", str(error)) from error
    if not packets:
        raise DecodeFailure("open", "the video stream has no frames")
    shown = sorted(pts for pts, _ in packets)
    return VideoIndex(
        pts=tuple(shown),
        key_pts=tuple(sorted(pts for pts, is_key in packets if is_key)),
        time_base=time_base,
        key_places_agree=all(shown[place] == pts for place, (pts, is_key) in enumerate(packets) if is_key),
    )

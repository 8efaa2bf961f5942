"""Opening a video file, and what it says about itself without decoding: its header."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.content import FORMAT_WHITELIST, HEAD_BYTES, PROTOCOL_WHITELIST, open_regular, video_format
from vlm_pg.media.matroska_unit import check_unit
from vlm_pg.media.mp4_tables import check_tables

# Decoders that give an error for damage they notice, instead of a patched frame, and compare picture hashes (HEVC)
# where there are some. That of H.264 takes the leading frames of an open group for damage and is not asked to.
STRICT_CODECS = ("hevc", "mjpeg")
# Containers (as FFmpeg is told them) that state the length of the whole file only. Where FFmpeg has not seen a stream's
# first packet yet, it gives the stream that length.
_STATE_NO_STREAM = ("matroska", "flv", "asf")
_STRICT = {"err_detect": "crccheck+explode"}


@dataclass(frozen=True)
class VideoHeader:
    """What the container states. The size is before rotation; 0 stands for "not stated".

    ``duration_seconds``: of the whole file, its longest stream. ``video_seconds``: of the video stream alone, where the
    container has a place for that. ``start_seconds``: the timestamp with which players begin to count, that of the
    stream that begins first, without what audio decoders throw away; None where nothing is known.
    """

    width: int
    height: int
    duration_seconds: float
    video_seconds: float
    stated_fps: float
    codec: str
    start_seconds: float | None = None


@contextmanager
def open_video(path: Path, max_pixels: int = 0) -> Iterator[tuple[Any, Any]]:
    """The container and the video stream FFmpeg calls best (the default one, then by bit rate), decoded by one thread.

    What the file is, is judged by its content first; FFmpeg reads it as that and may open nothing else. It is closed
    whatever happens inside.

    Args:
        path: the file.
        max_pixels: pictures of more than twice this area get no memory; 0 for no limit. Where a picture is above the
            limit and still gets memory, the caller can say how large it is.

    Raises:
        DecodeFailure: it is no container that is read, or has no video stream that can be decoded.
    """
    import av

    container_format = judge(path)
    options = {"format_whitelist": FORMAT_WHITELIST, "protocol_whitelist": PROTOCOL_WHITELIST}
    limits = {"max_pixels": str(2 * max_pixels)} if max_pixels else {}
    with reading("open", (av.FFmpegError,)):
        # Titles and names of tracks may be in any encoding; none is used.
        container = av.open(
            path.as_posix(), format=container_format, options=options | limits, metadata_errors="replace"
        )
    try:
        with reading("open", (av.FFmpegError,)):
            stream = container.streams.best("video")
            if stream is None:
                raise DecodeFailure("open", "the file has no video stream")
            if stream.codec_context is None:
                raise DecodeFailure("open", "its video is encrypted or in a codec that is not known")
            stream.codec_context.thread_count = 1
            is_strict = stream.codec_context.codec.canonical_name in STRICT_CODECS
            stream.codec_context.options = limits | (_STRICT if is_strict else {})
        yield container, stream
    finally:
        container.close()


def judge(path: Path) -> str:
    """FFmpeg's name of the container, by its content. Raises DecodeFailure for a file that must not reach a decoder."""
    with open_regular(path) as file:
        container_format = video_format(file.read(HEAD_BYTES))
        if container_format == "mov":
            check_tables(file, os.fstat(file.fileno()).st_size)
        elif container_format == "matroska":
            check_unit(file, os.fstat(file.fileno()).st_size)
    return container_format


def read_header(path: Path) -> VideoHeader:
    """The header of a video file. Raises DecodeFailure when it is not a video."""
    with open_video(path) as (container, stream):
        return header_of(container, stream)


def header_of(container: Any, stream: Any) -> VideoHeader:
    """The header of an open video."""
    with reading("open", ()):
        whole_seconds = (container.duration or 0) / 1_000_000
        states_streams = container.format.name not in _STATE_NO_STREAM
        stated = stream.duration if states_streams and stream.time_base else None
        video_seconds = float(stated * stream.time_base) if stated else 0.0
        return VideoHeader(
            width=stream.width or 0,
            height=stream.height or 0,
            duration_seconds=max(0.0, whole_seconds, video_seconds),
            video_seconds=max(0.0, video_seconds),
            stated_fps=float(stream.average_rate or 0),
            codec=stream.codec_context.codec.canonical_name,
            start_seconds=None if container.start_time is None else container.start_time / 1_000_000,
        )

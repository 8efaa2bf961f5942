"""Judging a file by its content, opening a video file, and its header: what it states without decoding."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container_checks import check_tables, check_unit
from vlm_pg.types import MediaKind

# FFmpeg's names of the allowed demuxers, by our name of the container
CONTAINERS = {
    "MP4 or QuickTime": "mov",
    "Matroska or WebM": "matroska",
    "MPEG-TS": "mpegts",
    "MPEG-PS": "mpeg",
    "AVI": "avi",
    "FLV": "flv",
    "Ogg": "ogg",
    "ASF": "asf",
}
# FFmpeg's second lock: full names of the same demuxers, and the only way to reach a file
FORMAT_WHITELIST = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mpegts,mpeg,avi,flv,ogg,asf"
PROTOCOL_WHITELIST = "file"

HEAD_BYTES = 1024
_IMAGES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png"}
# boxes an MP4 or QuickTime file may begin with; a first box is never so large that its first byte is not 0
_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"uuid", b"moof", b"sidx"}
_TS_PACKETS = ((0, 188), (4, 192), (0, 204))  # where the sync byte lies, and the distance to the next one
_ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
# Decoders that give an error for damage they notice, instead of a patched frame, and compare picture hashes (HEVC)
# where there are some. That of H.264 takes the leading frames of an open group for damage, so it is not set there.
STRICT_CODECS = ("hevc", "mjpeg")
# Containers (by FFmpeg's names) that state the length of the whole file only. Where FFmpeg has not seen a stream's
# first packet yet, it gives the stream that length.
_STATE_NO_STREAM = ("matroska", "flv", "asf")
_STRICT = {"err_detect": "crccheck+explode"}


@dataclass(frozen=True)
class VideoHeader:
    """What the container states. The size is before rotation; 0 stands for "not stated".

    ``duration_seconds``: of the whole file, its longest stream. ``video_seconds``: of the video stream alone, where the
    container has a field for that. ``start_seconds``: the timestamp with which players begin to count, that of the
    stream that begins first, without what audio decoders throw away; None where nothing is known.
    """

    width: int
    height: int
    duration_seconds: float
    video_seconds: float
    stated_fps: float
    start_seconds: float | None = None


@contextmanager
def open_video(path: Path, max_pixels: int = 0) -> Iterator[tuple[Any, Any]]:
    """The container and the video stream FFmpeg calls best (the default one, then by bit rate), decoded by one thread.

    What the file is, is judged by its content first; FFmpeg reads it as that and may open nothing else. It is closed
    whatever happens inside.

    Args:
        max_pixels: pictures of more than twice this area get no memory; 0 for no limit. Where a picture is above the
            limit and still gets memory, the caller can report its size.

    Raises:
        DecodeFailure: it is no container that is read, or has no video stream that can be decoded.
    """
    import av

    container_format = judge(path)
    options = {"format_whitelist": FORMAT_WHITELIST, "protocol_whitelist": PROTOCOL_WHITELIST}
    limits = {"max_pixels": str(2 * max_pixels)} if max_pixels else {}
    with reading((av.FFmpegError,)):
        # Titles and names of tracks may be in any encoding; none is used.
        container = av.open(
            path.as_posix(), format=container_format, options=options | limits, metadata_errors="replace"
        )
    try:
        with reading((av.FFmpegError,)):
            stream = container.streams.best("video")
            if stream is None:
                raise DecodeFailure("the file has no video stream")
            if stream.codec_context is None:
                raise DecodeFailure("its video is encrypted or in a codec that is not known")
            stream.codec_context.thread_count = 1
            is_strict = stream.codec_context.codec.canonical_name in STRICT_CODECS
            stream.codec_context.options = limits | (_STRICT if is_strict else {})
        yield container, stream
    finally:
        container.close()


def judge(path: Path) -> str:
    """FFmpeg's name of the container, by its content. Raises DecodeFailure for a file that must not reach a decoder."""
    with open_regular(path) as file:
        head = file.read(HEAD_BYTES)
        name = _container(head)
        if name is None:
            raise DecodeFailure(
                f"its content ({shown_head(head)}) is none of the containers that are read: {', '.join(CONTAINERS)}"
            )
        container_format = CONTAINERS[name]
        if container_format == "mov":
            check_tables(file, os.fstat(file.fileno()).st_size)
        elif container_format == "matroska":
            check_unit(file, os.fstat(file.fileno()).st_size)
    return container_format


def header_of(container: Any, stream: Any) -> VideoHeader:
    """The header of an open video."""
    with reading(()):
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
            start_seconds=None if container.start_time is None else container.start_time / 1_000_000,
        )


def open_regular(path: Path, folder: int | None = None) -> BinaryIO:
    """The file for reading; in an open ``folder`` (a descriptor) no link is followed. Raises DecodeFailure."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not wait for a writer
    try:
        descriptor = os.open(path, flags if folder is None else flags | os.O_NOFOLLOW, dir_fd=folder)
        file = os.fdopen(descriptor, "rb")
    except (OSError, ValueError) as error:
        raise DecodeFailure(f"it cannot be opened ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise DecodeFailure("it is not a regular file")
    return file


def stored_as(head: bytes) -> tuple[MediaKind, str] | None:
    """Kind and file name suffix of a file that begins with ``head``; None for neither image nor video.

    stored_as(b"\\xff\\xd8\\xff...") == ("image", ".jpg")
    """
    for begin, suffix in _IMAGES.items():
        if head.startswith(begin):
            return "image", suffix
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image", ".webp"
    name = _container(head)
    return None if name is None else ("video", ".mkv" if name == "Matroska or WebM" else ".mp4")


def _container(head: bytes) -> str | None:
    if head[4:8] in _FIRST_BOXES and head[:1] == b"\0":
        return "MP4 or QuickTime"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "Matroska or WebM"
    if head.startswith(b"\0\0\1\xba"):
        return "MPEG-PS"
    if head.startswith(b"RIFF") and head[8:12] in (b"AVI ", b"AVIX"):
        return "AVI"
    if head.startswith(b"FLV\1"):
        return "FLV"
    if head.startswith(b"OggS\0"):
        return "Ogg"
    if head.startswith(_ASF_HEADER):
        return "ASF"
    for start, distance in _TS_PACKETS:
        syncs = head[start::distance]
        if len(syncs) > 2 and set(syncs) == {0x47}:
            return "MPEG-TS"
    return None


def shown_head(head: bytes) -> str:
    """How the content begins, for a message."""
    return f"it begins with {head[:16]!r}" if head else "it is empty"

"""What a file is, judged by its first bytes and before any decoder sees it.

A decoder left to itself also opens scripts and play lists, which name other files and addresses. Only containers that
hold their pictures themselves are let through, and FFmpeg is then told which of them to read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.types import MediaKind

# FFmpeg's names of the demuxers that may be used, by what we call the container
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


def open_regular(path: Path, folder: int | None = None) -> BinaryIO:
    """The file for reading; in an open ``folder`` (a descriptor) no link is followed.

    Raises:
        DecodeFailure: it cannot be opened or is no file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not wait for a writer
    try:
        descriptor = os.open(path, flags if folder is None else flags | os.O_NOFOLLOW, dir_fd=folder)
        file = os.fdopen(descriptor, "rb")
    except (OSError, ValueError) as error:
        raise DecodeFailure("open", f"it cannot be opened ({getattr(error, 'strerror', None) or error})") from error
    if not _is_regular(descriptor):
        file.close()
        raise DecodeFailure("open", "it is not a regular file")
    return file


def _is_regular(descriptor: int) -> bool:
    import stat

    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def video_format(head: bytes) -> str:
    """FFmpeg's name of the container that begins with ``head``.

    Raises:
        DecodeFailure: it is none of ``CONTAINERS``.
    """
    name = _container(head)
    if name is None:
        raise DecodeFailure(
            "open", f"its content ({shown_head(head)}) is none of the containers that are read: {', '.join(CONTAINERS)}"
        )
    return CONTAINERS[name]


def stored_as(head: bytes) -> tuple[MediaKind, str] | None:
    """What begins with ``head``, and the ending of the name under which it can be read; None for neither of the two.

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

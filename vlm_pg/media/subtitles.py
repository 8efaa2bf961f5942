"""Subtitles of a video, .srt or .vtt: their texts in plain words, and which are shown during a part of it."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.content import open_regular
from vlm_pg.media.remote import download
from vlm_pg.media.selection import Part, Timeline
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitle_files import Fault, lines_of, read_srt, read_vtt
from vlm_pg.media.subtitle_markup import plain_srt, plain_vtt
from vlm_pg.media.urls import url_path
from vlm_pg.types import Cue

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_subtitles(path: str, name: str, settings: MediaSettings) -> tuple[Cue, ...]:
    """All subtitles of a local file or a URL, in the order of their beginnings.

    Markup is taken away and each text put on one line; what has no text then is left out. Their times are those of the
    file: seconds on a player's clock (``cues_within``).

    Raises:
        SampleError: ``bad_subtitles`` for a file that is too large, in another encoding than UTF-8 or UTF-16, or has a
            line that is not written as its name says; what ``download`` raises.
    """
    try:
        if "://" in path:
            with download(path, settings) as file:
                file.seek(0)
                data = file.read(settings.max_subtitle_bytes + 1)
            suffix = PurePosixPath(url_path(path)).suffix
        else:
            with open_regular(Path(path)) as file:
                data = file.read(settings.max_subtitle_bytes + 1)
            suffix = Path(path).suffix
        if len(data) > settings.max_subtitle_bytes:
            raise Fault(f"are larger than media.max_subtitle_bytes={settings.max_subtitle_bytes}")
        return _cues(_decoded(data), suffix.lower().removeprefix("."))
    except (Fault, DecodeFailure, OSError) as error:
        why = str(error) if isinstance(error, Fault) else f"cannot be read: {error}"
        raise SampleError(
            "bad_subtitles",
            f"subtitles '{name}' {why}. A SubRip (.srt) or WebVTT (.vtt) file in UTF-8 is expected. Convert or correct "
            "the file, leave 'subtitles' out of the record, or set prompt.subtitles=false.",
        ) from error


def cues_within(cues: Sequence[Cue], part: Part, timeline: Timeline) -> tuple[Cue, ...]:
    """The subtitles that are shown at some time of the clip, at one of the moments, or during the whole video.

    Args:
        cues: all that the file has, in seconds on a player's clock, which begins with the first sound or picture.
        part: what of the video is shown.
        timeline: when its frames are shown, and when that clock begins and ends.

    Returns:
        Those of the part, in seconds since the first frame; what is said before it, at 0. Without a start or an end it
        goes to where the file does: sound may begin before the first picture and go on after the last one.
    """
    moved = [Cue(cue.start + timeline.clock_zero, cue.end + timeline.clock_zero, cue.text) for cue in cues]
    if part.times:
        shown = [cue for cue in moved if _covers_one(cue, part.times)]
    else:
        start = timeline.clock_zero if part.start is None else part.start
        last = max(timeline.end, timeline.clock_end)
        end = last if part.end is None else min(part.end, last)
        shown = [cue for cue in moved if cue.start < end and (cue.end > start or cue.start >= start)]
    return tuple(Cue(max(0.0, cue.start), max(0.0, cue.end), cue.text) for cue in shown)


def _covers_one(cue: Cue, times: Sequence[float]) -> bool:
    place = bisect_left(times, cue.start)
    return place < len(times) and (times[place] < cue.end or times[place] == cue.start)


def _decoded(data: bytes) -> str:
    encoding = "utf-16" if data.startswith(_UTF16) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise Fault(f"are not text in {encoding.upper().removesuffix('-SIG')} (byte {error.start})") from error


def _cues(text: str, kind: str) -> tuple[Cue, ...]:
    # Files that were put together have such marks in between.
    lines = lines_of(text.replace("\ufeff", "").lstrip(" \t\r\n"))
    read, plain = (read_vtt, plain_vtt) if kind == "vtt" else (read_srt, plain_srt)
    cues = [Cue(one.start / 1000, one.end / 1000, plain("\n".join(one.lines))) for one in read(lines)]
    for cue in cues:
        if cue.end < cue.start:
            raise Fault(f"have one that begins at {cue.start:g} s and ends at {cue.end:g} s")
    return tuple(sorted((cue for cue in cues if cue.text), key=lambda cue: (cue.start, cue.end)))

"""The media that a record names, which part of each is meant, and whether the marks in its text are as many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from vlm_pg.data.fields import fault
from vlm_pg.errors import SampleError
from vlm_pg.types import MEDIA_MARKS, MediaKind, MediaRef, Sample

MAX_TIMES = 16_384
MAX_FOLDER_FPS = 1000
_PARTS = ("start", "end", "times", "subtitles", "folder_fps")
_ABSENT: tuple[Any, ...] = (None, "", [])


def media_of(record: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    """The media in order; ``data_type`` holds for all of them or is a list with one entry for each."""
    path = record.get("path")
    paths = [path] if isinstance(path, str) else [] if path is None else path
    if not isinstance(paths, list) or not all(isinstance(item, str) for item in paths):
        raise fault("wrong_type", f"'path' is a {type(path).__name__}", "A string or a list of strings", "it")
    written = record.get("data_type")
    if written is None:
        raise fault("missing_field", "'data_type' is missing", "image, video or text", "the record")
    if written in ("text", []):
        if any(paths):
            raise fault("media_in_text_record", f"'data_type' is text but 'path' is {paths}", "An empty path", "either")
        return ()
    kinds = written if isinstance(written, list) else [written] * len(paths)
    allowed = get_args(MediaKind)
    if not all(isinstance(kind, str) and kind in allowed for kind in (kinds if kinds is written else [written])):
        expected = "image, video, text, or a list of the first two"
        raise fault("unknown_data_type", f"'data_type' is {written!r}", expected, "it")
    if not paths or not all(paths):
        raise fault("missing_field", "'path' is missing or empty", f"The path of the {written}", "the record")
    if len(kinds) != len(paths):
        raise fault("wrong_type", f"'data_type' lists {len(kinds)} kinds for {len(paths)} paths", "One for each", "it")
    parts = [_values(record, name, len(paths), single=isinstance(path, str)) for name in _PARTS]
    return tuple(_reference(*one) for one in zip(kinds, paths, *parts, strict=True))


def check_marks(sample: Sample) -> None:
    """Refuse a sample whose question and options have marks of a kind, and another number of media of that kind.

    Raises:
        SampleError: ``media_mark_without_medium``.
    """
    text = "\n".join((sample.question, *sample.options))
    for kind, mark in MEDIA_MARKS.items():
        marks, media = text.count(mark), sum(ref.kind == kind for ref in sample.media)
        if marks not in (0, media):
            raise mark_fault(kind, marks, media, "the text")


def mark_fault(kind: MediaKind, marks: int, media: int, text: str) -> SampleError:
    """The refusal of so many marks in ``text`` for so many media of a kind."""
    return fault(
        "media_mark_without_medium",
        f"{text} has '{MEDIA_MARKS[kind]}' {marks} time(s), and the record names {media} {kind}(s)",
        f"One mark where each {kind} stands, or none, which shows the media before the text,",
        "the text or 'path'",
    )


def parts_of(media: Sequence[MediaRef]) -> dict[str, Any]:
    """The fields of a record that say which part of each medium is meant; none where all are whole."""
    fields: dict[str, Any] = {}
    for name in _PARTS:
        values = [getattr(ref, name) for ref in media]
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        if any(value not in _ABSENT for value in values):
            fields[name] = values[0] if len(values) == 1 else values
    return fields


def _values(record: Mapping[str, Any], name: str, count: int, single: bool) -> Sequence[Any]:
    """A field's value for each medium; it is a list where ``path`` is one."""
    value = record.get(name)
    if value in _ABSENT:
        return [None] * count
    if single:
        return [value]
    if not isinstance(value, list) or len(value) != count:
        came = f"'{name}' is {_shown(value)} beside a 'path' that lists {count} media"
        raise fault("wrong_type", came, "A list with an entry for each", "it")
    return value


def _reference(kind: MediaKind, path: str, start: Any, end: Any, times: Any, subtitles: Any, rate: Any) -> MediaRef:
    given = dict(zip(_PARTS, (start, end, times, subtitles, rate), strict=True))
    named = [name for name, value in given.items() if value not in _ABSENT]
    if kind != "video" and named:
        raise fault("bad_clip", f"an image has '{named[0]}'", "A video with it, or an image without,", "either")
    if times not in _ABSENT and {"start", "end"} & set(named):
        raise fault("bad_clip", "'times' stand beside 'start' or 'end'", "Moments, or a clip,", "either")
    begins, ends = _seconds("start", start), _seconds("end", end)
    if ends is not None and ends <= (begins or 0.0):
        raise fault("bad_clip", f"the clip begins at {begins or 0:g} s and ends at {ends:g} s", "A later end", "it")
    if subtitles not in _ABSENT and not isinstance(subtitles, str):
        raise fault("wrong_type", f"'subtitles' is {_shown(subtitles)}", "The path of a .srt or .vtt file", "it")
    return MediaRef(kind, path, begins, ends, _times(times), subtitles or "", _folder_fps(rate))


def _times(times: Any) -> tuple[float, ...]:
    if times in _ABSENT:
        return ()
    if not isinstance(times, list) or len(times) > MAX_TIMES:
        raise fault("wrong_type", f"'times' is {_shown(times)}", f"A list of up to {MAX_TIMES} seconds", "it")
    moments = tuple(moment for time in times if (moment := _seconds("times", time)) is not None)
    if len(moments) < len(times) or any(later <= earlier for earlier, later in itertools.pairwise(moments)):
        raise fault("bad_clip", f"'times' is {_shown(times)}", "Seconds, each later than the one before,", "it")
    return moments


def _folder_fps(value: Any) -> float | None:
    if value in _ABSENT:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_FOLDER_FPS:
        allowed = f"A number of pictures a second, above 0 and up to {MAX_FOLDER_FPS},"
        raise fault("bad_clip" if is_number else "wrong_type", f"'folder_fps' is {_shown(value)}", allowed, "it")
    return float(value)


def _seconds(name: str, value: Any) -> float | None:
    if value in _ABSENT:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fault("wrong_type", f"'{name}' holds {_shown(value)}", "A number of seconds", "it")
    try:
        seconds = float(value)
    except OverflowError:  # JSON has whole numbers of any length
        seconds = math.inf
    if not math.isfinite(seconds) or seconds < 0:
        raise fault("bad_clip", f"'{name}' holds {seconds}", "Seconds from 0 on", "it")
    return seconds


def _shown(value: Any) -> str:
    return repr(value)[:80]

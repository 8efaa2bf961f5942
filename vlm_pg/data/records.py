"""Records in Video-R1's format to ``Sample`` and back.

    {"problem_id": 8, "problem": "What object is filmed?", "data_type": "video", "problem_type": "multiple choice",
     "options": ["A. a keyboard", "B. a piano"], "process": "", "solution": "<answer>A</answer>",
     "path": "./video_90.mov", "data_source": "real-media"}

``problem_type`` says how the answer is checked: one of the five kinds of Video-R1, or multiple select (all right
options and no other: "<answer>A, C</answer>" or "<answer>none</answer>"), mathematics, exact, yes/no, box, time span,
mean relative accuracy. ``process`` is the reasoning that leads to the answer, for supervised training. ``data_type`` is
image, video or text (then ``path`` is empty); for several media ``path`` is a list, and where images and videos are
mixed ``data_type`` is a list beside it. Media come before the question, or where "<image>" and "<video>" stand in
``problem`` and ``options``: the n-th "<image>" is the n-th image, and there is one for each or none.

A conversation has ``turns``, the texts after the question: the assistant's first turn, then the user's and the
assistant's in alternation, up to one of the assistant. Supervised training teaches them instead of ``process`` and
``solution``, and ``solution`` and ``problem_type`` may be left out. All media belong to the question:

    {"problem_id": 9, "problem": "<video>\\nWhat is filmed?", "data_type": "video", "path": "./video_90.mov",
     "turns": ["A keyboard.", "Which colour?", "Black."], "data_source": "real-media"}

A preference pair has ``rejected``, the worse response. The better one is the only one of ``turns``, or without turns
``process`` and ``solution``, one line below the other:

    {"problem_id": 10, "problem": "What is filmed?", "data_type": "video", "path": "./video_90.mov",
     "turns": ["A keyboard."], "rejected": "A piano.", "data_source": "real-media"}

May be added: ``category``, which evaluation reports by; ``details``, an object of what an evaluation set publishes of
a question beside that (in Parquet its JSON as a text); of a video ``start`` and ``end`` of the clip that is meant,
``times`` of the frames to show, in seconds since its first frame, and ``subtitles``, the path of its .srt or .vtt file;
``folder_fps`` where ``path`` is a folder of numbered pictures, of which so many are shown a second. Where ``path`` is a
list each of these is a list with one entry (or null) for each medium. Other keys are ignored.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from vlm_pg.data.fields import (
    WRITTEN_NAMES,
    Unreadable,
    answer_kind_of,
    answer_of,
    answers_in,
    check_gold,
    check_text,
    check_tokens,
    details_of,
    fault,
    field,
    id_of,
    options_of,
    rejected_of,
    turns_of,
)
from vlm_pg.data.files import read_raw
from vlm_pg.data.tables import embedded_in
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.files import replacing
from vlm_pg.types import MEDIA_MARKS, BadSample, MediaKind, MediaRef, Sample

ID_LIMIT = 200
MAX_TIMES = 16_384
MAX_FOLDER_FPS = 1000
_PARTS = ("start", "end", "times", "subtitles", "folder_fps")
_ABSENT: tuple[Any, ...] = (None, "", [])


def read_records(path: Path) -> tuple[list[Sample], list[BadSample]]:
    """All usable samples of a file or folder in its order, and the records that are not.

    Args:
        path: as ``read_raw`` takes it.

    Raises:
        ConfigError: the file is missing, does not parse (with the line), has no records, or holds media inside rows.
    """
    first_at: dict[str, str] = {}
    found = list(stream_records(path, first_at.setdefault))
    return [one for one in found if isinstance(one, Sample)], [one for one in found if isinstance(one, BadSample)]


def stream_records(path: Path, first_at: Callable[[str, str], str]) -> Iterator[Sample | BadSample]:
    """As ``read_records``, one record after the other.

    Args:
        first_at: ``(sample id, location)`` to the location where the id was first used, which it remembers.
    """
    where = None
    for location, record in read_raw(path):
        where = location.within(path)
        _refuse_embedded(path, record)
        try:
            sample = parse_record(record, where)
            earlier = first_at(sample.sample_id, where)
            if earlier != where:
                raise SampleError(
                    "duplicate_id",
                    f"problem_id '{sample.sample_id}' was used before, at {earlier}. Each record needs its own. "
                    "Renumber one of them.",
                )
            yield sample
        except SampleError as error:
            value = record.get("problem_id") if isinstance(record, Mapping) else None
            has_id = isinstance(value, int | str) and str(value).strip()
            yield BadSample(printable(str(value), ID_LIMIT) if has_id else where, error.reason, str(error), where)
    if where is None:
        raise _no_records(path)


def refuse_no_records(path: Path) -> None:
    """Refuse a file or folder that ``read_raw`` refuses at its beginning, or that has no record.

    Raises:
        ConfigError: as ``read_records``.
    """
    if next(iter(read_raw(path)), None) is None:
        raise _no_records(path)


def _no_records(path: Path) -> ConfigError:
    return ConfigError(
        f"Data file '{printable(str(path), 300)}' has no records. At least one is expected. Check how the file was "
        "prepared."
    )


def with_paths(record: Any, unpack: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """The record with paths for media in its 'path'; other columns are ignored."""
    return {**record, **unpack({"path": record["path"]})} if "path" in embedded_in(record) else record


def _refuse_embedded(path: Path, record: Any) -> None:
    """A record whose media have paths may hold further ones, which are ignored."""
    inside = embedded_in(record)
    if not inside or record.get("data_type") == "text":
        return
    paths = record.get("path")
    if paths and all(isinstance(one, str) for one in (paths if isinstance(paths, list) else [paths])):
        return
    raise ConfigError(
        f"Data set '{printable(str(path), 300)}' holds media inside its rows ({printable(', '.join(inside), 200)}). "
        "Training reads media from files, and records name them in 'path'. Prepare it first: 'vlm-pg prepare' lists "
        "the data sets it knows, and 'vlm-pg prepare video_r1 --train' takes records in Video-R1's format."
    )


def write_records(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines that ``read_records`` reads back equal. The file appears whole or not at all.

    Names of media that are not UTF-8 are written with JSON's escapes.
    """
    if path.suffix.lower() != ".jsonl":
        raise ConfigError(f"Records are written to .jsonl files; got '{path}'. Choose a name that ends in .jsonl.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.writelines(map(line_of_record, samples))


def line_of_record(sample: Sample) -> bytes:
    """A sample as a line of JSON."""
    return (json.dumps(to_record(sample), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def parse_record(record: Any, where: str = "") -> Sample:
    """One record to a sample. ``where``: its location. Raises SampleError: with the reason why it cannot be used."""
    if isinstance(record, Unreadable):
        raise fault("unreadable_value", f"the record is {record.what}", "An object with one value for each name", "it")
    if not isinstance(record, Mapping):
        raise fault("not_a_record", f"the record is a {type(record).__name__}", "An object with named fields", "it")
    sample_id = id_of(record)
    question = field(record, "problem", str)
    if not question.strip():
        raise fault("empty_question", "'problem' is empty", "The text of a question", "it")
    solution = record.get("solution")
    options = options_of(record, next(iter(answers_in(solution)), "") if isinstance(solution, str) else "")
    for name, text in (("problem_id", sample_id), ("problem", question), *(("options", one) for one in options)):
        check_text(name, text)
    check_tokens("the text", "\n".join((question, *options)))
    turns = turns_of(record)
    answer_kind = answer_kind_of(record)
    answer = answer_of(record, answer_kind, options)
    if answer and answer_kind in ("multiple_choice", "multiple_select"):
        check_gold(options, answer)
    source = field(record, "data_source", str, default="unknown") or "unknown"
    process = field(record, "process", str, default="")
    sample = Sample(
        sample_id=sample_id,
        question=question,
        media=media_of(record),
        options=options,
        answer=answer,
        answer_kind=answer_kind,
        source=source,
        category=field(record, "category", str, default=source) or source,
        process=process,
        turns=turns,
        rejected=rejected_of(record, turns),
        details=details_of(record),
        where=where,
    )
    texts = {"solution": answer, "data_source": source, "category": sample.category, "process": process}
    for name, text in texts.items():
        check_text(name, text)
    check_marks(sample)
    if sample.rejected.strip() == sample.response.strip():
        raise fault("equal_answers", "'rejected' is the chosen response", "Another response", "either")
    return sample


def to_record(sample: Sample) -> dict[str, Any]:
    """The record of a sample, the inverse of ``parse_record``."""
    kinds = [ref.kind for ref in sample.media]
    paths = [ref.path for ref in sample.media]
    responses: dict[str, Any] = {
        "solution": f"<answer>{sample.answer}</answer>" if sample.answer else "",
        "turns": list(sample.turns),
        "rejected": sample.rejected,
    }
    record: dict[str, Any] = {
        "problem_id": sample.sample_id,
        "problem": sample.question,
        "data_type": "text" if not kinds else kinds[0] if len(set(kinds)) == 1 else kinds,
        "problem_type": WRITTEN_NAMES[sample.answer_kind],
        "options": list(sample.options),
        "process": sample.process,
        **{name: value for name, value in responses.items() if value},
        "path": "" if not paths else paths[0] if len(paths) == 1 else paths,
        "data_source": sample.source,
    }
    if sample.category != sample.source:
        record["category"] = sample.category
    if sample.details:
        record["details"] = dict(sample.details)
    for name in _PARTS:
        values = [getattr(ref, name) for ref in sample.media]
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        if any(value not in _ABSENT for value in values):
            record[name] = values[0] if len(values) == 1 else values
    return record


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
    """Refuse a sample with marks of a kind in question and options, and another number of media of that kind.

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


def _reference(kind: MediaKind, path: str, start: Any, end: Any, times: Any, subtitles: Any, fps: Any) -> MediaRef:
    given = dict(zip(_PARTS, (start, end, times, subtitles, fps), strict=True))
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
    return MediaRef(kind, path, begins, ends, _times(times), subtitles or "", _folder_fps(fps))


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

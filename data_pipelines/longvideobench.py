r"""LongVideoBench: multiple choice on what is seen and spoken in videos of up to an hour, for evaluation only.

    vlm-pg prepare longvideobench LongVideoBench --out data/longvideobench
    vlm-pg prepare longvideobench --eval lvb_val.json --media-root LongVideoBench --out data/longvideobench

Published: longvideobench/LongVideoBench ``lvb_val.json``, 1,337 rows: ``video_id``, ``question``,
``question_wo_referring_query``, two to five ``candidates`` without letters, ``correct_choice`` (a number from 0 on),
``position`` (frames), ``topic_category``, ``question_category`` (17), ``level``, ``id``, ``video_path``,
``subtitle_path``, ``duration_group`` (15, 60, 600, 3600), ``starting_timestamp_for_subtitles``, ``duration`` (seconds)
and ``view_count``; ``validation-*.parquet``, the same, or with ``option0`` to ``option4`` instead of
``candidates``, filled up with "N/A". ``lvb_test_wo_gt.json`` has no answers, so its rows are refused. ``videos.tar``
(in parts) unpacks to ``videos/<video_path>``, ``subtitles.tar`` to ``subtitles/<subtitle_path>``.

Subtitles are those of the video that a clip was cut from, as JSON of two forms: {"timestamp": [s, e], "text"} in
seconds, of which e may be null (it is shown to the clip's end then), and {"start", "end", "line"} as "HH:MM:SS.mmm".
``starting_timestamp_for_subtitles`` is taken from their times, what is spoken outside of the clip left out; the rest
is written as WebVTT to ``unpacked`` below the media root, and records name that file. They are read where ``subtitles``
lies beside the annotations; the report counts records without. Evaluation reports by ``question_category``.

Licence: CC BY-NC-SA 4.0; the videos are those of people on YouTube and TikTok.

Record: {"problem_id": "9PD3ciudpIE_0", "problem": "What color is the woman's clothing?", "data_type": "video",
"problem_type": "multiple choice", "options": ["A. yellow", "B. green", "C. blue", "D. red"],
"solution": "<answer>A</answer>", "path": "9PD3ciudpIE.mp4", "data_source": "longvideobench", "category": "T2A",
"details": {"video_id": "9PD3ciudpIE", "duration_group": 600, "duration": 467.92, "question_category": "T2A",
"topic_category": "NP-News-Programs", "level": "L1-Perception", "position": [3068], "view_count": 4172,
"question_wo_referring_query": "What color is it?", "starting_timestamp_for_subtitles": 0,
"subtitle_path": "9PD3ciudpIE_en.json"}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, letter_at, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, files_beside, read_rows
from data_pipelines.engine.fields import called, list_of, named, number_of, text_of, texts_of, unusable
from data_pipelines.engine.rows import Subtitles
from vlm_pg.data.files import RecordLocation, read_raw
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.types import Cue

_SUBTITLES = ("subtitles/*.json",)
_COLUMNS = ("option0", "option1", "option2", "option3", "option4")
_NO_OPTION = "N/A"
_DETAILS = (
    "video_id", "duration_group", "duration", "question_category", "topic_category", "level", "position", "view_count",
    "question_wo_referring_query", "starting_timestamp_for_subtitles", "subtitle_path",
)  # fmt: skip
_CLOCK = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2}(?:\.\d{1,9})?)", re.ASCII)


def to_record(row: Row) -> dict[str, Any]:
    texts = _candidates(row)
    return {
        "problem": text_of(row, "question"),
        **answered("multiple choice", letter_at(called(row, "correct_choice"), len(texts)), lettered(texts)),
        "path": text_of(row, "video_path"),
        "subtitles": _subtitles(row),
        "category": text_of(row, "question_category"),
        "details": {field: row[field] for field in _DETAILS if row.get(field) is not None},
    }


def cues_of(subtitles: Sequence[Any], zero: float, duration: float) -> Iterator[Cue]:
    """The subtitles that are shown during a clip, in seconds since it begins.

    Args:
        subtitles: as they are published, of either form.
        zero: where the clip begins in the video that they belong to, in seconds.
        duration: of the clip, in seconds.

    Raises SampleError: ``bad_subtitles``: one is of neither form, or ends before it begins.
    """
    for one in subtitles:
        start, end, text = _read(one, zero + duration)
        if end < start:
            raise _bad(f"one goes from {start:g} s to {end:g} s")
        if end > zero and start < zero + duration:
            yield Cue(max(0.0, start - zero), end - zero, text)


def _read(one: Any, last: float) -> tuple[float, float, str]:
    """When a subtitle is shown, in seconds of the whole video, and what it says. ``last``: for one without an end."""
    times: tuple[float | None, float | None] = (None, None)
    text: Any = None
    if isinstance(one, Mapping) and isinstance(one.get("timestamp"), list) and len(one["timestamp"]) == 2:
        begins, ends = one["timestamp"]
        times = _seconds(begins), max(last, _seconds(begins) or 0.0) if ends is None else _seconds(ends)
        text = one.get("text")
    elif isinstance(one, Mapping):
        times, text = (_clock(one.get("start")), _clock(one.get("end"))), one.get("line")
    if times[0] is None or times[1] is None or not isinstance(text, str):
        raise _bad(f"one is {str(one)[:120]}")
    return times[0], times[1], text


def _seconds(value: Any) -> float | None:
    """A number of seconds below the largest that clocks of three digits show; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -1e6 < value < 3.6e6 else None


def _clock(value: Any) -> float | None:
    """Seconds of "01:02:03.456"; None for anything else."""
    found = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3]) if found else None


def _bad(came: str) -> SampleError:
    allowed = '{"timestamp": [s, e], "text"} or {"start", "end", "line"}'
    return unusable("bad_subtitles", f"of the subtitles {came}", allowed)


def _subtitles(row: Row) -> Subtitles | None:
    """The subtitles of the clip; None where their file is missing."""
    file = row.get("subtitle_file")
    if not file:
        return None
    zero, duration = number_of(row, "starting_timestamp_for_subtitles"), number_of(row, "duration")
    try:
        subtitles = [one for _, one in read_raw(Path(file))]
    except ConfigError as error:
        raise _bad(f"the file cannot be read: {error}") from None
    return Subtitles(tuple(cues_of(subtitles, zero, duration)))


def _candidates(row: Row) -> list[str]:
    if row.get("candidates") is not None:
        return texts_of(list_of(row, "candidates"), "'candidates'")
    texts = texts_of([row.get(column) for column in _COLUMNS], "the options")
    while texts and texts[-1] == _NO_OPTION:
        texts.pop()
    if _NO_OPTION in texts:
        raise unusable("bad_options", f"an option above others is '{_NO_OPTION}'", "Only the last ones without a text")
    return texts


def _with_subtitles(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Rows with the file of their video's subtitles, where it lies beside the annotations."""
    files = {file.name: str(file) for file in files_beside(path, _SUBTITLES)}
    for location, row in read_rows(path):
        if isinstance(row, Mapping):
            row = {**row, "subtitle_file": files.get(str(row.get("subtitle_path")))}
        yield location, row


_JSON = Form(
    "lvb_val.json",
    {"eval": ("lvb_val.json", "*/lvb_val.json")},
    ("id", "question", "video_path", "question_category", "candidates"),
    to_record,
    rows=_with_subtitles,
    questions=named("id"),
    suffixes=(".json",),
    beside=_SUBTITLES,
    subtitled=True,
)
_PARQUET = replace(
    _JSON,
    name="LongVideoBench's Parquet",
    files={"eval": (".:validation", "[Ll]ong[Vv]ideo[Bb]ench*:validation")},
    columns=("id", "question", "video_path", "question_category", ("candidates", "option0")),
    suffixes=(".parquet",),
)
_VIDEOS = ("[Ll]ong[Vv]ideo[Bb]ench*/videos",)
LONGVIDEOBENCH = DataSet("longvideobench", (_JSON, _PARQUET), media=_VIDEOS, shared={"videos": ""})
main = pipeline(LONGVIDEOBENCH, __doc__, __name__)

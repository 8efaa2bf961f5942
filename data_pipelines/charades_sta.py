"""Charades-STA: its sentences about moments of everyday videos to checked records that ask when they happen.

    vlm-pg prepare charades_sta charades --media-root charades --out data/charades_sta
    vlm-pg prepare charades_sta --train charades_sta_train.txt --eval charades_sta_test.txt --media-root charades \\
        --out data/charades_sta

Published: jiyanggao/TALL ``charades_sta_{train,test}.txt``, lines such as "3MSZA 24.3 30.4##person turn a light on.":
video, seconds, sentence. Some spans end after their video does. Where the tables of Charades (``Charades_v1_train.csv``
and ``Charades_v1_test.csv``, columns ``id`` and ``length``) lie beside the lines, or in a folder ``Charades`` there,
such an end becomes the video's; a span that begins there is refused. Without the tables spans stay as they are.
lmms-lab/charades_sta ``data/test-*.parquet``: ``video`` ("3MSZA.mp4"), ``caption``, ``timestamp`` of two half precision
numbers: 24.3 reads 24.296875 there, and becomes 24.3 again. The videos are those of Charades,
``Charades_v1_480/<video>.mp4`` (or ``Charades_v1``), or directly in ``Charades`` or ``videos``. Rows have no names of
their own. ``details`` have the ``sentence`` and, where a table says it, the video's ``duration`` in seconds.

Licence: lmms-lab's copy is MIT, of the lines see the project; of the videos see Charades
(prior.allenai.org/projects/charades).

Record: {"problem_id": "charades_sta_test-1", "problem": "When does this happen in the video: person turn a light on.",
"data_type": "video", "problem_type": "time span", "options": [], "solution": "<answer>[24.3, 30.4]</answer>",
"path": "3MSZA.mp4", "data_source": "charades_sta", "details": {"sentence": "person turn a light on."}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from data_pipelines.engine.answers import answered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, files_beside, in_folders, read_rows, text_lines
from data_pipelines.engine.fields import (
    called,
    list_of,
    number_of,
    object_of,
    plain_number,
    text_of,
    unusable,
    video_file,
)
from vlm_pg.data.files import RecordLocation
from vlm_pg.data.tables import shortest
from vlm_pg.errors import ConfigError, SampleError, printable

TABLES = ("Charades_v1_*.csv", "Charades/Charades_v1_*.csv", "../Charades_v1_*.csv", "../Charades/Charades_v1_*.csv")
# The folders of Charades' videos, whose five-character names are unique, at any depth; and those that other
# sets have too, with clips cut of these videos below them.
CHARADES = tuple(f"{outer}{name}" for outer in ("", "*/", "*/*/") for name in ("Charades_v1_480", "Charades_v1"))
CHARADES_SHARED = dict.fromkeys(("Charades", "charades", "videos"), "")
_LINE = re.compile(r"(\S+)\s+([0-9]{1,6}(?:\.[0-9]{1,6})?)\s+([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*##(.*)", re.DOTALL)
_DECIMALS = 3


def of_line(row: Row) -> dict[str, Any]:
    line = text_of(row, "line")
    found = _LINE.fullmatch(line.strip())
    if found is None:
        allowed = "A line such as '3MSZA 24.3 30.4##person turn a light on.'"
        raise unusable("bad_line", f"the line is '{line[:80]}'", allowed)
    video, start, end, caption = found.groups()
    return _record(video, caption, float(start), float(end), row.get("length"))


def of_row(row: Row) -> dict[str, Any]:
    times = list_of(row, "timestamp")
    if len(times) != 2:
        raise unusable("bad_time_span", f"'timestamp' lists {len(times)} times", "When it begins and ends")
    start, end = (shortest(number_of({"timestamp": time}, "timestamp"), np.float16) for time in times)
    return _record(called(row, "video"), text_of(row, "caption"), start, end, row.get("length"))


def _record(video: str, caption: str, start: float, end: float, length: float | None) -> dict[str, Any]:
    caption = caption.strip()
    if not caption:
        raise unusable("empty_question", "the sentence is empty", "What happens in the video")
    # What lies beyond the video's end, where that is known, is cut off.
    start, end = round(start, _DECIMALS), round(end if length is None else min(end, length), _DECIMALS)
    if not 0 <= start < end:
        shown = "" if length is None else f" of a video of {plain_number(length)} s"
        came = f"it happens from {plain_number(start)} to {plain_number(end)} s{shown}"
        raise unusable("bad_time_span", came, "A span that begins in the video and ends later")
    return {
        "problem": f"When does this happen in the video: {caption}",
        **answered("time span", f"[{plain_number(start)}, {plain_number(end)}]"),
        "path": video_file(video),
        "details": {"sentence": caption} | ({} if length is None else {"duration": length}),
    }


def _lines(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    lengths = _lengths(path)
    for location, row in text_lines(path):
        video = row["line"].partition("##")[0].split()[:1]
        yield location, row | {"length": lengths.get(video[0]) if video else None}


def _rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    lengths = _lengths(path)
    for location, row in read_rows(path):
        known = isinstance(row, dict) and isinstance(row.get("video"), str)
        yield location, row | {"length": lengths.get(PurePosixPath(row["video"]).stem)} if known else row


def _lengths(path: Path) -> dict[str, float]:
    """Seconds of each video that the tables beside the annotations list."""
    lengths: dict[str, float] = {}
    for table in files_beside(path, TABLES):
        for location, row in read_rows(table):
            try:
                row = object_of(row, "a row")
                lengths[called(row, "id")] = number_of({"length": float(row["length"])}, "length")
            except (SampleError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"'{printable(str(table), 300)}:{location}' has no length of a video. A table of Charades, with "
                    "columns id and length (in seconds), is expected beside the annotations. Copy it from the project "
                    "again, or remove it: spans are not cut at the videos' ends then."
                ) from error
    return lengths


_LINES = Form(
    "charades_sta_{train,test}.txt",
    in_folders(("", "*/"), "charades_sta_train.txt", "charades_sta_test.txt"),
    ("line",),
    of_line,
    rows=_lines,
    suffixes=(".txt",),
    beside=TABLES,
)
_PARQUET = Form(
    "lmms-lab/charades_sta",
    {"train": (), "eval": ("data:test", ".:test")},
    ("video", "caption", "timestamp"),
    of_row,
    rows=_rows,
    suffixes=(".parquet",),
    beside=TABLES,
)
CHARADES_STA = DataSet("charades_sta", (_LINES, _PARQUET), media=CHARADES, shared=CHARADES_SHARED)
main = pipeline(CHARADES_STA, __doc__, __name__)

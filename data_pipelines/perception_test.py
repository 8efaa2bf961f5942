"""Perception Test, multiple choice: its questions about everyday and staged videos to checked multiple choice records.

    vlm-pg prepare perception_test perception_test --out data/perception_test
    vlm-pg prepare perception_test --train mc_question_train.json --eval mc_question_valid.json \\
        --media-root perception_test --out data/perception_test

Published: google-deepmind/perception_test ``mc_question_{train,valid,test}.json``, an object with a member for each
video: ``metadata`` (``frame_rate``, ``num_frames``, ...) and ``mc_question``, a list of ``id`` (it restarts),
``question``, three ``options``, ``answer_id`` from 0, ``area``, ``reasoning`` and ``tag``; the test file has no
``answer_id``. Videos with an empty list are left out: other tasks of the set ask about them.
lmms-lab/PerceptionTest_Val ``mc_question_val/validation-*.parquet``: a row a question, ``video_name``, ``question_id``,
and the rest as above, all of it text. The videos are ``videos/video_10309.mp4``; ``videos`` may lie in ``train``,
``valid``, ``validation``, ``data`` or ``perception_test``; of folders in it ``part1`` and so on count, and all where it
lies in ``perception_test``. What CLEVRER's folders hold is none of them, nor a name that both have (from video_10000
on) beside names that only CLEVRER has. Evaluation reports by area.

Of some videos the end shows the answer: under which cup the ball is. ``cut_frame_mapping_{train,valid}.json`` lists the
videos of its split with the frame they are to be cut at, {"video_10309": 60}, and -1 for those that are shown whole. It
must lie beside the annotations, or in the folder above. A question goes by the map of its own split, which its metadata
say, or the name of its file. A record's clip ends half a frame before the frame; seconds come of the metadata's frame
rate. Questions are refused where that map is missing or leaves the video out, whatever another one says, and where it
cuts a video whose frame rate is not known: so are lmms-lab's rows about such videos, because its table has none.

Licence: annotations and videos CC BY 4.0.

Record: {"problem_id": "video_10309_2", "problem": "Under which cup is the ball at the end?", "data_type": "video",
"problem_type": "multiple choice", "options": ["A. the left one", "B. the middle one", "C. the right one"],
"solution": "<answer>B</answer>", "path": "video_10309.mp4", "end": 1.983, "data_source": "perception_test",
"category": "memory"}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipelines.clevrer import perception_tests_in
from data_pipelines.engine.answers import answered, letter_at, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Reader, Row, files_beside, in_folders, keyed_rows, read_rows
from data_pipelines.engine.fields import (
    called,
    list_of,
    listed_questions,
    named,
    object_of,
    text_of,
    texts_of,
    unusable,
    video_file,
)
from vlm_pg.data.files import RecordLocation, read_json_object

CUTS = ("cut_frame_mapping_*.json", "../cut_frame_mapping_*.json")
# Other data sets have folders of this name, and a video_10309.mp4 in them.
_SPLITS = ("train", "valid", "val", "validation", "test", "sample")
_NAMED = tuple(f"{split}{mark}videos" for split in _SPLITS for mark in "/_")
_VIDEOS = ("[Pp]erception*/videos",)
_SHARED = dict.fromkeys(("videos", *_NAMED, "data/videos"), "part*")
_WHOLE = -1
# Of file names: "mc_question_train.json", "validation-00000-of-00001.parquet", "mc_question_val:validation".
_SPLIT = re.compile(r"(?<![a-z])(train|val|valid|validation|test)(?![a-z])")
_FASTEST = 100_000  # frames a second: an upper bound of real rates, and no infinity


def questions(row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """The questions about a video, named after it: "video_10309_2"."""
    shared = {field: row.get(field) for field in ("video_name", "metadata", "cut", "map")}
    return listed_questions(row, name, "mc_question", "id", called(row, "video_name"), **shared)


def of_question(row: Row) -> dict[str, Any]:
    """One question about a video as a record."""
    metadata = object_of(row["metadata"], "'metadata'")
    return _record(row, object_of(row["question"], "the question"), metadata)


def _record(row: Row, question: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    texts = texts_of(list_of(question, "options"), "'options'")
    video = called(row, "video_name")
    return {
        "problem": text_of(question, "question"),
        **answered("multiple choice", letter_at(called(question, "answer_id"), len(texts)), lettered(texts)),
        "path": video_file(video),
        "end": _end(video, row, metadata),
        "category": text_of(question, "area"),
    }


def _end(video: str, row: Row, metadata: Mapping[str, Any]) -> float | None:
    """Seconds at which the video is to be cut; None where it is shown whole."""
    cut, name = row.get("cut"), row.get("map")
    if cut is None:
        came = f"no {name} beside the annotations lists" if name else "neither metadata nor file name say the split of"
        allowed = "The map of its split, as the project publishes it,"
        raise unusable("unknown_cut", f"{came} '{video}', whose end may show the answer", allowed)
    if cut == _WHOLE and not isinstance(cut, bool):
        return None
    frames = metadata.get("num_frames")
    last = frames if isinstance(frames, int) else cut
    if isinstance(cut, bool) or not isinstance(cut, int) or not 0 < cut <= last:
        came = f"'{video}', of {frames} frames, is to be cut at {str(cut)[:80]}"
        raise unusable("bad_cut", came, "One of its frames, or -1,")
    rate = metadata.get("frame_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < _FASTEST:
        came = f"'{video}' is to be cut at frame {cut}, and its frame rate is not known"
        raise unusable("no_frame_rate", came, "The project's own annotations, whose metadata have it,")
    # Half a frame before the one that may show the answer, so that no rounding lets it in.
    return round((cut - 0.5) / rate, 3)


def _with_cuts(read: Reader) -> Reader:
    """The reader with the frame that each row's video is cut at, and the name of the map that says so."""

    def rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
        cuts, split_of_file = _cuts(path), _split_in(path.name)
        for location, row in read(path):
            video = row.get("video_name") if isinstance(row, Mapping) else None
            if not isinstance(video, str):
                yield location, row
                continue
            metadata = row.get("metadata")
            named = metadata.get("split") if isinstance(metadata, Mapping) else None
            split = _split_in(named) if isinstance(named, str) else split_of_file
            name = f"cut_frame_mapping_{split}.json" if split else ""
            yield location, {**row, "cut": cuts.get(name, {}).get(video), "map": name}

    return rows


def _split_in(name: str) -> str | None:
    """The split that a name tells last, as maps are called after it."""
    found = _SPLIT.findall(name.lower())
    return ("valid" if found[-1].startswith("val") else found[-1]) if found else None


def _cuts(path: Path) -> Mapping[str, dict[str, Any]]:
    """The cuts of each map, by its name."""
    maps: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for file in files_beside(path, CUTS):
        cuts = maps[file.name]
        for _, video, cut in read_json_object(file):
            cuts[video] = cut if cuts.get(video, cut) == cut else f"{cuts[video]} and {cut}"
    return maps


_JSON = Form(
    "mc_question_{train,valid}.json",
    in_folders(("", "*/"), "mc_question_train.json", "mc_question_valid.json"),
    ("metadata", "mc_question"),
    of_question,
    rows=_with_cuts(keyed_rows("video_name")),
    questions=questions,
    suffixes=(".json",),
    beside=CUTS,
    empty="videos without a question of multiple choice",
)
_PARQUET = Form(
    "lmms-lab/PerceptionTest_Val",
    {"train": (), "eval": ("mc_question_val:validation", ".:validation")},
    ("video_name", "question_id", "question", "options", "answer_id", "area"),
    lambda row: _record(row, row, {}),
    rows=_with_cuts(read_rows),
    questions=named("video_name", "question_id"),
    suffixes=(".parquet",),
    beside=CUTS,
)
PERCEPTION_TEST = DataSet(
    "perception_test", (_JSON, _PARQUET), media=_VIDEOS, shared=_SHARED, own_in=perception_tests_in
)
main = pipeline(PERCEPTION_TEST, __doc__, __name__)

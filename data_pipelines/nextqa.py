"""NExT-QA, multiple choice: its CSV files (or Parquet) of questions about videos to checked records.

    vlm-pg prepare nextqa nextqa --media-root NExTVideo --out data/nextqa
    vlm-pg prepare nextqa --train train.csv --eval val.csv --media-root NExTVideo --out data/nextqa

Published: doc-doc/NExT-QA ``{train,val,test}.csv``, rows ``video``, ``question``, ``answer`` (0 to 4), ``qid`` (it
counts the questions of a video), ``type`` and ``a0`` to ``a4``; lmms-lab/NExTQA ``MC/test-*.parquet``, the same. Test
has answers, and is evaluated on where --eval names it. A few rows have equal options; they are refused where the gold
text is one of these. NExTVideo.zip unpacks to ``NExTVideo/0101/2909445186.mp4``, in folders that
``map_vid_vidorID.json`` names; lmms-lab's copy has no folders. The map is read where it lies beside the annotations,
and is not needed where ``NExTVideo`` is below the media root, or is it: videos are found there by name. They are also
found in ``videos`` (or ``VidOR/video``), directly or in folders of four digits, and nowhere else. Evaluation reports by
type: CW, CH, TN, TC, TP, DC, DL, DO; ``details`` have ``type`` and ``qid``.

Licence: annotations MIT; of the videos see VidOR, which they come from.

Record: {"problem_id": "4010069381_6", "problem": "how do the two man play the instrument", "data_type": "video",
"problem_type": "multiple choice", "options": ["A. roll the handle", "B. tap their feet", "C. strum the string",
"D. hit with sticks", "E. pat with hand"], "solution": "<answer>A</answer>", "path": "4010069381.mp4",
"data_source": "nextqa", "category": "CH", "details": {"type": "CH", "qid": "6"}}
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, letter_at, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, files_beside, read_rows
from data_pipelines.engine.fields import called, named, published, text_of, video_file
from vlm_pg.data.files import RecordLocation, read_json_object
from vlm_pg.errors import ConfigError, SampleError, printable

_MAP = "map_vid_vidorID.json"
_OPTIONS = ("a0", "a1", "a2", "a3", "a4")


def to_record(row: Row) -> dict[str, Any]:
    video = called(row, "video")
    texts = [text_of(row, key).strip() for key in _OPTIONS]
    return {
        "problem": text_of(row, "question"),
        **answered("multiple choice", letter_at(called(row, "answer"), len(texts)), lettered(texts)),
        "path": video_file(row.get("mapped") or video),
        "category": text_of(row, "type"),
        # Tables have it as a number, CSV as text.
        "details": published(row, "type") | {name: called(row, name) for name in published(row, "qid")},
    }


def _rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """With the folder of each video, where the map says it: {"video": "17", "mapped": "0101/17"}."""
    folders: dict[str, Any] = {}
    for file in files_beside(path, [_MAP]):
        try:
            folders |= {name: value for _, name, value in read_json_object(file)}
            if not all(isinstance(value, str) for value in folders.values()):
                raise ConfigError("a value is no text")
        except ConfigError as error:
            raise ConfigError(
                f"'{printable(str(file), 300)}' is no map of videos. An object such as "
                '{"2909445186": "0101/2909445186"} is expected. Copy the file from NExT-QA\'s project again, or remove '
                "it: the folders are looked through then."
            ) from error
    for location, row in read_rows(path):
        mapped = None
        with suppress(SampleError):  # it is refused later
            mapped = folders.get(called(row, "video")) if isinstance(row, dict) else None
        yield location, row | {"mapped": mapped} if isinstance(row, dict) else row


_FORM = Form(
    "{train,val,test}.csv or MC/*.parquet",
    {
        "train": ("train.csv", "dataset/nextqa/train.csv", "nextqa/train.csv"),
        "eval": ("val.csv", "dataset/nextqa/val.csv", "nextqa/val.csv", "MC:test", ".:test"),
    },
    ("video", "question", "answer", "qid", "type", *_OPTIONS),
    to_record,
    rows=_rows,
    questions=named("video", "qid"),
    beside=(_MAP,),
)
NEXTQA = DataSet(
    "nextqa",
    (_FORM,),
    media=("NExTVideo", "*/NExTVideo", "*/*/NExTVideo"),
    shared=dict.fromkeys(("videos", "[Nn][Ee][Xx][Tt]*/videos", "[Vv]id[Oo][Rr]/video"), "[0-9][0-9][0-9][0-9]"),
)
main = pipeline(NEXTQA, __doc__, __name__)

r"""Video-MME: multiple choice on videos of 11 seconds to an hour, with subtitles, to checked records for evaluation.

    vlm-pg prepare video_mme Video-MME --out data/video_mme
    vlm-pg prepare video_mme --eval videomme/test-00000-of-00001.parquet --media-root Video-MME --out data/video_mme

Published: lmms-lab/Video-MME ``videomme/test-00000-of-00001.parquet``, 2,700 rows, three about each of 900 videos:
``video_id`` ("001"), ``duration`` (short, medium, long), ``domain``, ``sub_category``, ``url``, ``videoID`` (what the
file is called), ``question_id`` ("001-1"), ``task_type``, ``question``, four ``options`` with their letters, and
``answer``, a letter. The archives ``videos_chunked_NN.zip`` unpack to ``data/<videoID>.mp4``, also .MP4 and .mkv;
``subtitle.zip`` to ``subtitle/<videoID>.srt`` for 744 of the videos. Unpack it before: a record names its video's
subtitles if the file is there, and the report counts those without. Videos are found by name
in ``data``, ``videos`` and ``video``, and anywhere below a folder called ``Video-MME``, however that is spelt.
Evaluation reports by ``task_type``; ``details`` hold what else it is reported by.

Licence: for academic research alone, see the project (BradyFU/Video-MME); the videos are those of people on YouTube.

Record: {"problem_id": "001-1", "problem": "What is shown first in the video?", "data_type": "video",
"problem_type": "multiple choice", "options": ["A. Apples.", "B. Candles.", "C. Berries.", "D. Stars."],
"solution": "<answer>C</answer>", "path": "fFjv93ACGo8.mp4", "subtitles": "subtitle/fFjv93ACGo8.srt",
"data_source": "video_mme", "category": "Temporal Perception", "details": {"duration": "short", "domain": "Knowledge",
"sub_category": "Humanity & History", "task_type": "Temporal Perception", "question_id": "001-1", "video_id": "001"}}
"""

from __future__ import annotations

from typing import Any

from data_pipelines.engine.answers import answered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.fields import called, list_of, named, text_of, texts_of, video_file

_TEXTS = ("duration", "domain", "sub_category", "task_type")
_SET = "[Vv]ideo*[Mm][Mm][Ee]"


def to_record(row: Row) -> dict[str, Any]:
    video = called(row, "videoID")
    ids = {"question_id": called(row, "question_id"), "video_id": called(row, "video_id")}
    return {
        "problem": text_of(row, "question"),
        **answered("multiple choice", text_of(row, "answer"), texts_of(list_of(row, "options"), "'options'")),
        "path": video_file(video),
        "subtitles": f"subtitle/{video}.srt",
        "category": text_of(row, "task_type"),
        "details": {**{field: text_of(row, field) for field in _TEXTS}, **ids},
    }


_FORM = Form(
    "lmms-lab/Video-MME's Parquet",
    {"eval": ("videomme:test", "*/videomme:test", ".:test")},
    (*_TEXTS, "video_id", "videoID", "question_id", "question", "options", "answer"),
    to_record,
    questions=named("question_id"),
    suffixes=(".parquet", ".jsonl", ".json"),
    subtitled=True,
)
VIDEO_MME = DataSet(
    "video_mme", (_FORM,), media=(_SET, f"{_SET}/data"), shared=dict.fromkeys(("data", "videos", "video"), "")
)
main = pipeline(VIDEO_MME, __doc__, __name__)

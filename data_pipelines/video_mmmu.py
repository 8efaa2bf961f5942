"""Video-MMMU: what is learned from lectures, asked in three tracks, to checked records; for evaluation only.

    vlm-pg prepare video_mmmu VideoMMMU --out data/video_mmmu
    vlm-pg prepare video_mmmu --eval VideoMMMU/Adaptation:test --media-root VideoMMMU --out data/adaptation

Published: lmms-lab/VideoMMMU ``{Perception,Comprehension,Adaptation}/test-00000-of-00001.parquet``, 300 rows each:
``id`` (the same three times, of one video), ``question``, ``options`` (a list, or one as text; up to 14), ``answer``,
``link_selected``, ``question_type``, ``qa_type``, and ``image`` in Adaptation; in the project's repository
``VideoMMMU/data/*.json``, a file for each track. The track is that of the folder or file name, and stands before the id
in a record's name. Videos are ``<Art|Business|Engineering|Humanities|Medicine|Science>/<id>.mp4``.

A question of Adaptation (it speaks of "<image 1>") is about a picture that is shown in the last frame of the video
alone: the medium is the video, and whatever chooses its frames must keep the last one. ``question_only`` in
``details`` is the video of that picture alone (``question_only/<id>_image.mp4``). Where that lies beside the folders of
the tracks (or of ``data``), the question is there a second time, about that video: what a model answers without the
lecture, of which Video-MMMU makes its knowledge gain. Such a record is called "..._question_only", its
``question_only`` is true, and it is in no other figure. Frames before the last do not show the picture; questions of
the other tracks are to be answered without it.

Where there are options a question is multiple choice. One of Adaptation's has options and the type "None"; the official
code asks it without them. 20 are open: numbers and texts, two of them a letter of the picture, which must be that
letter, and one a list that lost a quotation mark (``['24/7', '3.429', '3.43]``): all are kept as published, so that a
track has its 300 questions; to the official code no output is right for the last. Evaluation reports by track;
``details`` have ``track``, ``question_type``, ``subject`` (what stands between the first and last "_" of the id),
``link_selected``, ``qa_type`` and, in Adaptation, ``question_only``.

Licence: the card asks to accept its conditions; the videos are those of people on YouTube. See the project.

Record: {"problem_id": "Adaptation_validation_Math_2", "problem": "Which graph is it? <image 1>", "data_type": "video",
"problem_type": "multiple choice", "options": ["A. the first", "B. the second"], "process": "",
"solution": "<answer>B</answer>", "path": "Science/validation_Math_2.mp4", "data_source": "video_mmmu",
"category": "Adaptation", "details": {"track": "Adaptation", "question_type": "multiple-choice", "subject": "Math",
"link_selected": "https://www.youtube.com/watch?v=x", "question_only": "question_only/validation_Math_2_image.mp4"}}
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, lettered, open_answer
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, files_beside, read_rows
from data_pipelines.engine.fields import answer_text, called, named, published, text_of, texts_of, unusable, video_file
from vlm_pg.data.fields import have_letters
from vlm_pg.data.files import RecordLocation

_TRACKS = ("Perception", "Comprehension", "Adaptation")
_WITH_PICTURE = "Adaptation"
_DOMAINS = ("Art", "Business", "Engineering", "Humanities", "Medicine", "Science")
# The videos of pictures alone, from the folder of a track, or of the repository's JSON, on.
_ALONE = ("../question_only/*_image.mp4", "../../question_only/*_image.mp4")
_FOLDERS = (*_DOMAINS, "question_only")
_TYPES = ("multiple-choice", "open", "None")
# So long a text is no list of options.
_LONGEST_LIST = 20_000


def to_record(row: Row) -> dict[str, Any]:
    track, video = row["track"], called(row, "id")
    if track not in _TRACKS:
        allowed = f"Files of {', '.join(_TRACKS)}, which their names or their folders' say,"
        raise unusable("unknown_track", "neither the name of the file nor its folder tells the track", allowed)
    subject = video.partition("_")[2].rpartition("_")[0]
    details = {"track": track, "subject": subject, **published(row, "question_type", "link_selected", "qa_type")}
    path, picture = video_file(video), f"question_only/{video}_image.mp4"
    if track == _WITH_PICTURE:
        details["question_only"] = picture
    if row.get("without_lecture") is True:
        path, details["question_only"] = picture, True
    return {
        "problem": text_of(row, "question"),
        **_answer(row),
        "path": path,
        "category": track,
        "details": published(details, *details),
    }


def questions(row: Row, name: str) -> Iterator[tuple[str, Row]]:
    """The question of a row, and of Adaptation once more without the lecture, if that video is there."""
    for own, question in named("track", "id")(row, name):
        yield own, question
        if row.get("track") == _WITH_PICTURE and f"{row.get('id')}_image.mp4" in row.get("pictures", ()):
            yield f"{own}_question_only", {**row, "without_lecture": True}


def _answer(row: Row) -> dict[str, Any]:
    """The fields of a record that say how its answer is checked."""
    kind, gold, options = text_of(row, "question_type"), answer_text(row, "answer"), row.get("options")
    if isinstance(options, str):  # a list as Python writes it: "['red', 'blue']"
        text = options.strip()
        options = text or None
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            options = ast.literal_eval(text) if 0 < len(text) <= _LONGEST_LIST else options
    if not isinstance(options, list | None):
        raise unusable("bad_options", f"'options' is {str(options)[:80]}", "A list, or one as text,")
    options = texts_of(options or [], "'options'")
    if kind not in _TYPES:
        raise unusable("unknown_question_type", f"'question_type' is '{kind[:80]}'", f"One of {', '.join(_TYPES)}")
    if options:
        return answered("multiple choice", gold, options if have_letters(options) else lettered(options))
    if kind == _TYPES[0]:
        raise unusable("too_few_options", "a multiple choice question has no options", "Two or more")
    return open_answer(gold)


def _rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """With the track, as its file or folder is called, and which pictures have videos of their own."""
    names = [name.lower() for name in reversed(path.absolute().parts[-3:])]
    track = next((track for name in names for track in _TRACKS if track.lower() in name), None)
    pictures = frozenset(file.name for file in files_beside(path, _ALONE)) if track == _WITH_PICTURE else frozenset()
    for location, row in read_rows(path):
        yield location, row | {"track": track, "pictures": pictures} if isinstance(row, dict) else row


_FORM = Form(
    "Parquet or JSON of a track",
    {"eval": ("*ion:test", "VideoMMMU/*ion:test", "VideoMMMU/data/*.json", "data/*.json", "*ion.json")},
    ("id", "question", "options", "answer", "question_type"),
    to_record,
    rows=_rows,
    questions=questions,
    suffixes=(".json", ".jsonl", ".parquet"),
    beside=_ALONE,
)
VIDEO_MMMU = DataSet(
    "video_mmmu", (_FORM,), media=(*_FOLDERS, *(f"*/{folder}" for folder in _FOLDERS)), shared={"videos": ""}
)
main = pipeline(VIDEO_MMMU, __doc__, __name__)

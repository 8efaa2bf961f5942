r"""TempCompass: four tasks about action, speed, direction, order and change in short videos, for evaluation only.

    vlm-pg prepare tempcompass TempCompass --out data/tempcompass
    vlm-pg prepare tempcompass --eval questions/multi-choice.json --media-root TempCompass --out data/tempcompass

Published: llyx97/TempCompass ``questions/{multi-choice,yes_no,caption_matching,captioning}.json``, each an object of
videos, of which each is an object of dimensions (``dim``), each a list of ``question`` and ``answer``;
lmms-lab/TempCompass ``<task>/test-*.parquet``, a row a question: ``video_id``, ``question``, ``answer``, ``dim``, and
for captioning ``mc_question`` and ``mc_answer``. 1,580, 2,453, 1,503 and 2,004 questions about 410 videos,
``videos/<video_id>.mp4``.

Options stand in the question: lines "A. ..." (multi-choice), or two that begin with "Option 1:", "Sentence A:" or
"Caption A:" (caption_matching). They become options with letters; ``details`` keep the ``question`` and ``answer`` as
published. What a captioning question asks for can only be scored by a judge, who answers a question of multiple choice
from the caption: ``mc_question`` and ``mc_answer``, in the project's own files the first multi-choice question about
the same video and dimension. Such records are free-form with TempCompass's answer; rows whose question for the judge is
not there are refused (``no_mc_question``): keep ``multi-choice.json`` beside ``captioning.json``.

Evaluation reports by ``dim``. ``details`` hold ``task``, ``dim``, ``video_id`` and, where ``meta_info.json`` lies
beside the questions or in the folder above and tells it, ``fine_dim`` ("fine-grained action").

Licence: see the project (llyx97/TempCompass), for the annotations and for the videos.

Record: {"problem_id": "multi-choice_1034419625_action_1", "problem": "What is the man doing in the video?",
"data_type": "video", "problem_type": "multiple choice", "options": ["A. dunking a basketball",
"B. dribbling a basketball", "C. passing a basketball"], "solution": "<answer>A</answer>", "path": "1034419625.mp4",
"data_source": "tempcompass", "category": "action", "details": {"task": "multi-choice", "dim": "action",
"video_id": "1034419625", "fine_dim": "fine-grained action", "answer": "A. dunking a basketball", "question":
"What is the man doing in the video?\nA. dunking a basketball\nB. dribbling a basketball\nC. passing a basketball"}}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, letter_of, letter_of_text, lettered, split_options
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, files_beside, keyed_rows, read_rows
from data_pipelines.engine.fields import called, first_of, list_of, object_of, text_of, unusable, video_file
from vlm_pg.data.files import RecordLocation, read_json_object, root_of

DIMS = ("action", "speed", "direction", "order", "attribute_change")
_TASKS = "multi-choice", "yes_no", "caption_matching", "captioning"
_MULTI_CHOICE = "multi-choice.json"
# Of a video, beside its dimensions.
_ADDED = ("video_id", "task", "fine", "judged")
_META = ("meta_info.json", "../meta_info.json")
# Two options of caption matching: "Option 1: A man runs.", "Caption B: A man sits."
_LABELLED = re.compile(r"(?:Option [12]|(?:Sentence|Caption) [AB]): (.+)")


def questions(row: Row, name: str) -> Iterator[tuple[str, Row]]:
    """The questions about a video, named after task, video, dimension and number."""
    video, task = called(row, "video_id"), text_of(row, "task")
    for dim in (one for one in row if one not in _ADDED):
        shared = {"video_id": video, "task": task, "dim": dim, "fine_dim": row["fine"].get(dim)}
        for number, question in enumerate(list_of(row, dim), start=1):
            yield f"{task}_{video}_{dim}_{number}", {**row["judged"].get(dim, {}), **shared, "question": question}


def of_question(row: Row) -> dict[str, Any]:
    """One question about a video as a record; see ``to_record``."""
    question = object_of(row["question"], "the question")
    return to_record({**row, **{field: question.get(field) for field in ("question", "answer")}})


def to_record(row: Row) -> dict[str, Any]:
    task, dim, video = text_of(row, "task"), text_of(row, "dim"), called(row, "video_id")
    for kind, value, known in (("task", task, _TASKS), ("dim", dim, DIMS)):
        if value not in known:
            raise unusable(f"unknown_{kind}", f"the question's {kind} is '{value[:80]}'", f"One of {', '.join(known)}")
    question, fields, more = _KINDS[task](row)
    details = {"task": task, "dim": dim, "video_id": video, **more}
    if first_of(row, "fine_dim") is not None:
        details["fine_dim"] = text_of(row, "fine_dim")
    return {"problem": question, **fields, "path": video_file(video), "category": dim, "details": details}


Fields = tuple[str, dict[str, Any], dict[str, Any]]


def _choice(row: Row) -> Fields:
    """Question, fields of the answer, and details."""
    published, answer = text_of(row, "question"), text_of(row, "answer")
    question, options = split_options(published)
    fields = answered("multiple choice", letter_of(answer, options), options)
    return question, fields, {"question": published, "answer": answer}


def _matching(row: Row) -> Fields:
    published, answer = text_of(row, "question"), text_of(row, "answer")
    question, *lines = published.strip().split("\n")
    found = [_LABELLED.fullmatch(line.strip()) for line in lines]
    texts = [option[1] for option in found if option]
    if len(texts) != len(lines) or len(texts) != 2:
        came = f"{len(texts)} of the {len(lines)} lines below the question are captions"
        raise unusable("bad_options", came, "Two, as in 'Option 1: ...', 'Sentence A: ...', 'Caption A: ...',")
    letter = letter_of_text(answer, [line.strip() for line in lines])
    return question, answered("multiple choice", letter, lettered(texts)), {"question": published, "answer": answer}


def _yes_no(row: Row) -> Fields:
    answer = text_of(row, "answer")
    if answer.strip().lower() not in ("yes", "no"):
        raise unusable("no_gold_answer", f"the answer is '{answer[:80]}'", "yes or no")
    return text_of(row, "question"), answered("yes/no", answer.strip().lower()), {}


def _captioning(row: Row) -> Fields:
    if first_of(row, "mc_question") is None or first_of(row, "mc_answer") is None:
        came = "the caption's judge has no question of multiple choice"
        raise unusable("no_mc_question", came, f"'mc_question' and 'mc_answer', or {_MULTI_CHOICE} beside the file,")
    judged = {field: text_of(row, field) for field in ("mc_question", "mc_answer")}
    return text_of(row, "question"), answered("free-form", text_of(row, "answer")), judged


_KINDS: dict[str, Callable[[Row], Fields]] = dict(zip(_TASKS, (_choice, _yes_no, _matching, _captioning), strict=True))


def _of_videos(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Rows of the project's own files, with what lies beside them about the row's video."""
    fine, judged = _fine_dims(path), _judged(path)
    for location, row in keyed_rows("video_id")(path):
        if isinstance(row, Mapping):
            video = str(row["video_id"])
            more = {"task": path.stem, "fine": fine.get(video, {}), "judged": judged.get(video, {})}
            row = {**row, **more}
        yield location, row


def _of_rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Rows of a table, with their task, the name of their folder, and their number among those of a video."""
    fine, task = _fine_dims(path), root_of(path).resolve().name
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for location, row in read_rows(path):
        if isinstance(row, Mapping):
            video, dim = str(row.get("video_id")), str(row.get("dim"))
            counts[video, dim] += 1
            more = {"task": task, "number": counts[video, dim], "fine_dim": fine.get(video, {}).get(dim)}
            row = {**row, **more}
        yield location, row


def _fine_dims(path: Path) -> dict[str, dict[str, Any]]:
    """Of each video what its dimensions are in particular: {"1034419625": {"action": "fine-grained action"}}."""
    found: dict[str, dict[str, Any]] = {}
    for file in files_beside(path, _META)[:1]:
        for _, video, meta in read_json_object(file):
            dims = meta.get("eval_dim") if isinstance(meta, Mapping) else None
            dims = dims if isinstance(dims, Mapping) else {}
            found[video] = {dim: one.get("type") for dim, one in dims.items() if isinstance(one, Mapping)}
    return found


def _judged(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The question that a caption's judge answers, by video and dimension: the first of the multi-choice task."""
    found: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    if path.stem != "captioning":
        return found
    for file in files_beside(path, [_MULTI_CHOICE]):
        for _, video, dims in read_json_object(file):
            for dim, questions in dims.items() if isinstance(dims, Mapping) else ():
                if isinstance(questions, list) and questions and isinstance(questions[0], Mapping):
                    found[video][dim] = {f"mc_{name}": questions[0].get(name) for name in ("question", "answer")}
    return found


_JSON = Form(
    "questions/<task>.json",
    {"eval": ("questions/*.json", "*/questions/*.json")},
    (DIMS,),
    of_question,
    rows=_of_videos,
    questions=questions,
    suffixes=(".json",),
    beside=(_MULTI_CHOICE, *_META),
)
_PARQUET = Form(
    "lmms-lab/TempCompass",
    {"eval": ("[cmy][aeu]*[ego]:test", "*/[cmy][aeu]*[ego]:test")},
    ("video_id", "question", "answer", "dim"),
    to_record,
    rows=_of_rows,
    # As the same question is called in the project's own files.
    questions=lambda row, name: [(f"{row['task']}_{row.get('video_id')}_{row.get('dim')}_{row['number']}", row)],
    suffixes=(".parquet",),
    beside=_META,
)
TEMPCOMPASS = DataSet("tempcompass", (_JSON, _PARQUET), media=("[Tt]emp[Cc]ompass*/videos",), shared={"videos": ""})
main = pipeline(TEMPCOMPASS, __doc__, __name__)

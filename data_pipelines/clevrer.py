"""CLEVRER: its questions about colliding objects in synthetic videos to checked records of words, numbers and choices.

    vlm-pg prepare clevrer clevrer --out data/clevrer
    vlm-pg prepare clevrer --train train.json --eval validation.json --media-root clevrer --out data/clevrer

Published: clevrer.csail.mit.edu ``{train,validation,test}.json``, each an array of ``scene_index``,
``video_filename`` and ``questions``. Those of type descriptive have an ``answer``, one of 21 words: yes, no, digits,
colours, materials, shapes. Explanatory, predictive and counterfactual ones have ``choices``, each with the answer
"correct" or "wrong". None, one or several are correct, and a question is answered when every choice is judged right, so
all of these are of the kind multiple select. ``question_id`` restarts in every scene. The test file has no answers. The
videos unpack to ``video_train/video_00000-01000/video_00428.mp4``, a thousand a folder; they are found by name below
``video_train``, ``video_validation`` and ``video_test``, in folders of a thousand two levels below the media root, or
in the root. In ``train``, ``val``, ``validation`` and ``test`` (``train_video`` and so on; below ``videos`` or a folder
called "clevrer..." too) they are taken where no other set can own them: Perception Test has a video_10428.mp4, too. So
all numbers there must be of that split (train below 10000, validation below 15000, test below 20000), one of them 12000
or more for those that both have, or the folder is in one called "clevrer".

Licence: CC0, says the README of the data.

Record: {"problem_id": "video_10000_11", "problem": "Which of the following is responsible for the collision?",
"data_type": "video", "problem_type": "multiple select", "options": ["A. the presence of the gray cube",
"B. the collision between the cube and the sphere", "C. the red object's entering the scene"],
"solution": "<answer>A, C</answer>", "path": "video_10000.mp4", "data_source": "clevrer", "category": "explanatory"}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePosixPath
from typing import Any

from data_pipelines.engine.answers import answered, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, in_folders
from data_pipelines.engine.fields import (
    called,
    list_of,
    listed_questions,
    object_of,
    text_of,
    texts_of,
    unusable,
    video_file,
)
from vlm_pg.types import NONE_RIGHT

# CLEVRER and Perception Test both number their videos, and share 1,600 file names: CLEVRER writes five digits, and each
# split has numbers of its own; Perception Test's 11.6 thousand videos are counted from 0, without leading zeros.
CLEVRER_SPLITS = {
    "train": range(10_000),
    **dict.fromkeys(("val", "valid", "validation"), range(10_000, 15_000)),
    "test": range(15_000, 20_000),
}
# Perception Test's numbers end well below 12,000.
_CLEVRER_NUMBERS = range(12_000, 20_000)
_SHARED_NUMBERS = range(10_000, 12_000)
_VIDEO_NAME = re.compile(r"video_([0-9]+)")
_THOUSAND_NAME = re.compile(r"video_([0-9]{5})-([0-9]{5})")
_PART_NAME = re.compile(r"video_(?:train|validation|test)")
_SPLIT_NAME = re.compile(r"(?<![a-z])(train|validation|valid|val|test)(?![a-z])")
_WORDS = (
    *("gray", "red", "blue", "green", "brown", "cyan", "purple", "yellow"),
    *("rubber", "metal"),
    *("cube", "sphere", "cylinder"),
)
_PARTS = ("video_train", "video_validation", "video_test")
_THOUSAND = "video_[0-9]*-[0-9]*"
_VIDEOS = (*_PARTS, *(f"*/{part}" for part in _PARTS), *(f"{outer}{_THOUSAND}" for outer in ("", "*/", "*/*/")))
_ENDS = ("", "_video", "_videos")
# Not below a folder of any name: other rendered scenes have the same numbers.
_OUTER = ("", "[Vv]ideos/", "[Cc][Ll][Ee][Vv][Rr][Ee][Rr]*/")
_SHARED = {f"{outer}{split}{end}": _THOUSAND for outer in _OUTER for split in CLEVRER_SPLITS for end in _ENDS}
_OF_CHOICES = ("explanatory", "predictive", "counterfactual")


def questions(row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """The questions of a scene, named after its video: "video_00428_3"."""
    video = called(row, "video_filename")
    return listed_questions(row, name, "questions", "question_id", PurePosixPath(video).stem, video=video)


def to_record(row: Row) -> dict[str, Any]:
    question = object_of(row["question"], "the question")
    category = text_of(question, "question_type")
    if category == "descriptive":
        answer = called(question, "answer")
        kinds = {"yes/no": answer in ("yes", "no"), "numerical": answer.isascii() and answer.isdigit(),
                 "exact": answer in _WORDS}  # fmt: skip
        kind = next((kind for kind, fits in kinds.items() if fits), None)
        if kind is None:
            allowed = f"yes, no, a number, {', '.join(_WORDS)}"
            raise unusable("unknown_answer", f"'answer' is '{answer[:80]}'", allowed)
        fields = answered(kind, answer)
    elif category in _OF_CHOICES:
        choices = [object_of(choice, "a choice") for choice in list_of(question, "choices")]
        options = lettered(texts_of([choice.get("choice") for choice in choices], "'choices'"))
        judged = [text_of(choice, "answer") for choice in choices]
        unknown = next((judgement for judgement in judged if judgement not in ("correct", "wrong")), None)
        if unknown is not None:
            raise unusable("unknown_answer", f"a choice is '{unknown[:80]}'", "correct or wrong")
        letters = [option[0] for option, judgement in zip(options, judged, strict=True) if judgement == "correct"]
        fields = answered("multiple select", ", ".join(letters) or NONE_RIGHT, options)
    else:
        expected = f"descriptive, {', '.join(_OF_CHOICES[:-1])} or {_OF_CHOICES[-1]}"
        raise unusable("unknown_question_type", f"'question_type' is '{category[:80]}'", expected)
    return {"problem": text_of(question, "question"), **fields, "path": video_file(row["video"]), "category": category}


def clevrers_in(folder: PurePosixPath, beside: Collection[str]) -> Callable[[str], bool]:
    """``DataSet.own_in``: CLEVRER's folder of a thousand videos, or of a split, or in one called "clevrer"; else all
    names in the folder have numbers of its split, and files that Perception Test has too need one that it has not.
    """
    if thousand := _THOUSAND_NAME.fullmatch(folder.name):
        numbers = range(int(thousand[1]), int(thousand[2]))
        return lambda stem: _is_padded(stem) and _number(stem) in numbers
    split = _SPLIT_NAME.search(folder.name.lower())
    known = CLEVRER_SPLITS[split[1]] if split else range(20_000)
    if _is_in_clevrers(folder):
        return lambda stem: _is_padded(stem) and _number(stem) in known
    if not split or not all(_is_padded(name) and _number(name) in known for name in beside):
        return lambda stem: False
    only_clevrers = any(_number(name) in _CLEVRER_NUMBERS for name in beside)
    return lambda stem: _is_padded(stem) and (only_clevrers or _number(stem) not in _SHARED_NUMBERS)


def perception_tests_in(folder: PurePosixPath, beside: Collection[str]) -> Callable[[str], bool]:
    """``DataSet.own_in`` of Perception Test: files that neither the folder's name nor, for shared names, the files
    beside them assign to CLEVRER."""
    if _THOUSAND_NAME.fullmatch(folder.name) or _is_in_clevrers(folder):
        return lambda stem: False
    has_clevrers = any(_is_padded(name) and _number(name) not in _SHARED_NUMBERS for name in beside)
    return lambda stem: not has_clevrers or _number(stem) not in _SHARED_NUMBERS


def _is_in_clevrers(folder: PurePosixPath) -> bool:
    return any(_PART_NAME.fullmatch(name) or name.lower().startswith("clevrer") for name in folder.parts)


def _is_padded(stem: str) -> bool:
    """Whether it is written as CLEVRER writes: five digits."""
    return _number(stem) in range(20_000) and len(stem) == len("video_00000")


def _number(stem: str) -> int:
    """Its number; -1 where it has none."""
    found = _VIDEO_NAME.fullmatch(stem)
    return int(found[1]) if found and len(found[1]) <= 5 else -1


_FORM = Form(
    "{train,validation}.json",
    in_folders(("", "*/"), "train.json", "validation.json"),
    ("video_filename", "questions"),
    to_record,
    questions=questions,
    suffixes=(".json",),
)
CLEVRER = DataSet("clevrer", (_FORM,), media=_VIDEOS, shared=_SHARED, own_in=clevrers_in)
main = pipeline(CLEVRER, __doc__, __name__)

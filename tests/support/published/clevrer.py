"""CLEVRER: arrays of scenes, each with several questions, of which some have several right choices."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import AnswerKind, Sample

CHOICES = ("the cube", "the collision", "the sphere's entering")
OPTIONS = ("A. the cube", "B. the collision", "C. the sphere's entering")


def descriptive(number: int, answer: str | None) -> dict[str, Any]:
    """A descriptive question; None: without an answer, as in the test file."""
    question = {"question_id": number, "question": "What is it?", "program": ["events"]}
    question |= {"question_type": "descriptive", "question_subtype": "query_shape"}
    return question if answer is None else question | {"answer": answer}


def chosen(number: int, kind: str, *judged: str | None) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [
        {"choice_id": index, "choice": text, "program": ["objects"]} | ({} if answer is None else {"answer": answer})
        for index, (text, answer) in enumerate(zip(CHOICES, judged, strict=False))
    ]
    return {"question_id": number, "question": "Which is it?", "question_type": kind, "program": [], "choices": choices}


def scene(index: int, *questions: Any) -> dict[str, Any]:
    return {"scene_index": index, "video_filename": f"video_{index:05}.mp4", "questions": list(questions)}


RIGHT, WRONG = "correct", "wrong"
TRAIN = [
    scene(
        428,
        descriptive(0, "yes"),
        descriptive(1, "0"),
        descriptive(2, "rubber"),
        chosen(3, "explanatory", RIGHT, WRONG, RIGHT),
        chosen(4, "predictive", WRONG, RIGHT),
        chosen(5, "counterfactual", WRONG, WRONG, WRONG),
        chosen(6, "counterfactual", RIGHT, RIGHT, RIGHT),
        chosen(7, "explanatory", RIGHT),
    ),
    scene(
        429,
        descriptive(0, "no"),
        descriptive(1, "orange"),
        descriptive(2, None),
        chosen(3, "explanatory", RIGHT, "perhaps"),
        chosen(4, "causal", RIGHT, WRONG),
        chosen(5, "predictive", RIGHT, None),
    ),
    scene(2, descriptive(0, "cylinder")),
    {"scene_index": 3, "video_filename": "video_00003.mp4"},
    scene(430),
]
VALIDATION = [scene(10_000, descriptive(0, "4"), chosen(1, "predictive", RIGHT, WRONG))]
TEST = [scene(15_000, descriptive(0, None), chosen(1, "predictive", None, None))]


def sample(name: str, folder: str, kind: AnswerKind, answer: str, category: str, options: int = 0) -> Sample:
    scene_name = name.rpartition("_")[0]
    question = "Which is it?" if options else "What is it?"
    path = f"{folder}/{scene_name}.mp4"
    return Sample(name, question, video(path), OPTIONS[:options], answer, kind, "clevrer", category)


FIRST, LATER = "video_train/video_00000-01000", "video_validation/video_10000-11000"
VIDEOS = media(*(f"{FIRST}/video_{index:05}.mp4" for index in (3, 428, 429)), f"{LATER}/video_10000.mp4")
KEPT = [
    sample("video_00428_0", FIRST, "yes_no", "yes", "descriptive"),
    sample("video_00428_1", FIRST, "numerical", "0", "descriptive"),
    sample("video_00428_2", FIRST, "exact", "rubber", "descriptive"),
    sample("video_00428_3", FIRST, "multiple_select", "A, C", "explanatory", 3),
    sample("video_00428_4", FIRST, "multiple_select", "B", "predictive", 2),
    sample("video_00428_5", FIRST, "multiple_select", "none", "counterfactual", 3),
    sample("video_00428_6", FIRST, "multiple_select", "A, B, C", "counterfactual", 3),
    sample("video_00428_7", FIRST, "multiple_select", "A", "explanatory", 1),
    sample("video_00429_0", FIRST, "yes_no", "no", "descriptive"),
]
HELD_OUT = [
    sample("video_10000_0", LATER, "numerical", "4", "descriptive"),
    sample("video_10000_1", LATER, "multiple_select", "A", "predictive", 2),
]
REFUSED = [
    ("train.json:1, record 2", "video_00429_1", "unknown_answer"),
    ("train.json:1, record 2", "video_00429_2", "missing_field"),
    ("train.json:1, record 2", "video_00429_3", "unknown_answer"),
    ("train.json:1, record 2", "video_00429_4", "unknown_question_type"),
    ("train.json:1, record 2", "video_00429_5", "missing_field"),
    ("train.json:1, record 3", "video_00002_0", "missing_media"),
    ("train.json:1, record 4", "train-1.4", "missing_field"),
    ("train.json:1, record 5", "train-1.5", "no_questions"),
]

CASES = {
    "folder": Published(
        {"train.json": TRAIN, "validation.json": VALIDATION, "test.json": TEST, **VIDEOS}, KEPT, HELD_OUT, REFUSED
    )
}

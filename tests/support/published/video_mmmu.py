"""Video-MMMU: lmms-lab's Parquet of three tracks, pictures inside; the repository's JSON of each track."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import datasets

from tests.support.published.case import Published, media, picture, video
from vlm_pg.types import AnswerKind, Sample

LINK = "https://www.youtube.com/watch?v=x"
FOUR, FOURTEEN = ["slope", "area", "mean", "sum"], [f"{number}. step" for number in range(1, 15)]


def row(name: str, question: str, answer: str, options: list[str], kind: str = "multiple-choice") -> dict[str, Any]:
    found = {"id": name, "question": question, "options": options, "answer": answer, "question_type": kind}
    return found | {"link_selected": LINK, "qa_type": "OCR"}


MATH, MEDICINE, NEW = "validation_Math_15", "validation_Basic_Medical_Science_10", "new_Art_Theory_3"
BROKEN = "['24/7', '3.429', '3.43]"
PERCEPTION = [
    row(MATH, "What is drawn at the end?", "C", FOUR),
    row(MEDICINE, "Which step comes last?", "N", FOURTEEN),
    row(NEW, "Which colour?", "B", ["A. red", "B. blue"]),
    row(NEW + "1", "Which colour?", "B", ["A. red", "B. blue"]),
]
COMPREHENSION = [
    row(MATH, "Which are right?", "K", FOURTEEN[:11]),
    row(MEDICINE, "Which are right?", "L", FOURTEEN[:11]),
    row(MATH, "Which are right then?", "A", FOURTEEN[:11]),
]
ADAPTATION = [
    row(MATH, "How much is it in <image 1>?", BROKEN, [], "open"),
    row(MEDICINE, "Which place is it in <image 1>?", "C", [], "open"),
    row(NEW, "Which one is it in <image 1>?", "C", FOUR, "None"),
    row("dev_Math_1", "How much is it in <image 1>?", "0.3", [], "open"),
    row("dev_Math_2", "How much is it in <image 1>?", "D", []),
    row("dev_Math_3", "How much is it in <image 1>?", "", FOUR),
    row("dev_Math_4", "How much is it in <image 1>?", "x", [], "essay"),
]
VIDEOS = [
    f"Science/{MATH}.mp4", f"Medicine/{MEDICINE}.mp4", f"Art/{NEW}.mp4",
    *(f"Science/dev_Math_{number}.mp4" for number in range(1, 5)),
]  # fmt: skip
# The video of a picture alone, about which its question is there once more where it lies beside the tables; and what
# another system left in an archive, which is nothing.
FILES: dict[str, Any] = media(*VIDEOS, f"question_only/{MATH}_image.mp4", f"__MACOSX/Science/._{MATH}.mp4")


def sample(
    track: str, location: str, question: str, kind: AnswerKind, answer: str, options: list[str], published: str
) -> Sample:
    name = location.rpartition("/")[2].removesuffix(".mp4")
    lettered = tuple(f"{letter}. {text}" for letter, text in zip(string.ascii_uppercase, options, strict=False))
    details = {"track": track, "question_type": published, "link_selected": LINK, "qa_type": "OCR"}
    details["subject"] = name.split("_", 1)[1].rsplit("_", 1)[0]
    if track == "Adaptation":
        details["question_only"] = f"question_only/{name}_image.mp4"
    return Sample(
        f"{track}_{name}", question, video(location), lettered, answer, kind, "video_mmmu", track, details=details
    )


def without_lecture() -> Sample:
    """The question about a picture whose video is there."""
    alone = f"question_only/{MATH}_image.mp4"
    with_lecture = sample(
        "Adaptation", f"Science/{MATH}.mp4", "How much is it in <image 1>?", "exact", BROKEN, [], "open"
    )
    details = {**with_lecture.details, "question_only": True}
    return replace(
        with_lecture, sample_id=f"{with_lecture.sample_id}_question_only", media=video(alone), details=details
    )


def kept(below: str, *more: Sample) -> dict[str, list[Sample]]:
    """By track. ``more``: behind the first of Adaptation."""
    math, medicine, new, dev = (f"{below}{location}" for location in VIDEOS[:4])
    mc: tuple[AnswerKind, str] = ("multiple_choice", "multiple-choice")
    return {
        "Adaptation": [
            sample("Adaptation", math, "How much is it in <image 1>?", "exact", BROKEN, [], "open"),
            *more,
            sample("Adaptation", medicine, "Which place is it in <image 1>?", "exact", "C", [], "open"),
            sample("Adaptation", new, "Which one is it in <image 1>?", mc[0], "C", FOUR, "None"),
            sample("Adaptation", dev, "How much is it in <image 1>?", "numerical", "0.3", [], "open"),
        ],
        "Comprehension": [sample("Comprehension", math, "Which are right?", mc[0], "K", FOURTEEN[:11], mc[1])],
        "Perception": [
            sample("Perception", math, "What is drawn at the end?", mc[0], "C", FOUR, mc[1]),
            sample("Perception", medicine, "Which step comes last?", mc[0], "N", FOURTEEN, mc[1]),
            sample("Perception", new, "Which colour?", mc[0], "B", ["red", "blue"], mc[1]),
        ],
    }


def everything(below: str, *more: Sample) -> list[Sample]:
    return [one for track in kept(below, *more).values() for one in track]


def refused(location: str) -> dict[str, list[tuple[str, str, str]]]:
    """By track; ``location``: of a row, made of track and number."""
    return {
        "Adaptation": [
            (location.format("Adaptation", 5), "Adaptation_dev_Math_2", "too_few_options"),
            (location.format("Adaptation", 6), "Adaptation_dev_Math_3", "no_gold_answer"),
            (location.format("Adaptation", 7), "Adaptation_dev_Math_4", "unknown_question_type"),
        ],
        "Comprehension": [
            (location.format("Comprehension", 2), f"Comprehension_{MEDICINE}", "answer_not_in_options"),
            (location.format("Comprehension", 3), f"Comprehension_{MATH}", "duplicate_id"),
        ],
        "Perception": [(location.format("Perception", 4), f"Perception_{NEW}1", "missing_media")],
    }


def all_refused(location: str) -> list[tuple[str, str, str]]:
    return [one for track in refused(location).values() for one in track]


TEXT = datasets.Value("string")
FEATURES = datasets.Features(dict.fromkeys(PERCEPTION[0], TEXT) | {"options": datasets.List(TEXT)})
PICTURED = datasets.Features({**FEATURES, "image": datasets.Image()})
SHOWN = [one | {"image": {"bytes": picture(40), "path": None}} for one in ADAPTATION]
SHARD = "test-00000-of-00001.parquet"
TABLES = {
    f"Perception/{SHARD}": (PERCEPTION, FEATURES),
    f"Comprehension/{SHARD}": (COMPREHENSION, FEATURES),
    f"Adaptation/{SHARD}": (SHOWN, PICTURED),
}
# Options as text, as MMMU has them.
OF_TRACKS = {"Perception": PERCEPTION, "Comprehension": COMPREHENSION, "Adaptation": ADAPTATION}
OBJECTS = {
    f"{track}.json": [one | {"options": str(one["options"])} for one in rows] for track, rows in OF_TRACKS.items()
}

CASES = {
    "lmms-lab's Parquet": Published(
        {**TABLES, **FILES}, (), everything("", without_lecture()), all_refused(SHARD + ":{1}")
    ),
    "the repository's JSON, videos elsewhere": Published(
        {
            **{f"VideoMMMU/data/{name}": rows for name, rows in OBJECTS.items()},
            **{f"raw/{name}": None for name in FILES},
        },
        (),
        everything("raw/"),
        all_refused("{0}.json:1, record {1}"),
    ),
}

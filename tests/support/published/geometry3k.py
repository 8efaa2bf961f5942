"""Geometry3K: InterGPS' folders, each one object and a diagram, and hiyouga/geometry3k's Parquet, newer and older."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import datasets

from tests.support.published.case import Published, image, media, picture, stored
from vlm_pg.types import MediaRef, Sample

CHOICES = ["5", r"5 \sqrt { 2 }", r"5 \sqrt { 3 }", "10"]
OPTIONS = ("A. 5", r"B. 5 \sqrt { 2 }", r"C. 5 \sqrt { 3 }", "D. 10")
COMPACT = ["5", r"5\sqrt{2}", r"5\sqrt{3}", "10"]


def data(number: int, answer: Any, **changes: Any) -> dict[str, Any]:
    row = {"problem_text": "Find $x$.", "choices": CHOICES, "answer": answer, "id": number, "compact_choices": COMPACT}
    row |= {"precise_value": [5.0, 7.07, 8.66, 10.0], "problem_type_goal": ["Length"], "problem_type_graph": ["Circle"]}
    row |= {"annotat_text": "Find $x$.", "data_type": "train"}
    return row | changes


def sample(number: int, folder: str, answer: str, category: str = "Length") -> Sample:
    ref = image(f"{folder}{number}/img_diagram.png")
    return Sample(str(number), "Find $x$.", ref, OPTIONS, answer, "multiple_choice", "geometry3k", category)


PLAIN = {name: value for name, value in data(9, "D").items() if name in ("problem_text", "choices", "answer")}
FOLDERS = {
    "train/7": data(7, "B"),
    "train/8": data(8, "A", problem_type_goal=["Area", "Length"]),
    "train/9": PLAIN,
    "train/10": data(10, "E"),
    "train/11": data(11, "A", choices=["5", "5", "6", "7"]),
    "train/12": data(12, "A", choices=["5", "6", "6", "7"]),
    "train/13": data(13, "C"),
    "train/14": data(14, None),
    "test/2401": data(2401, "C"),
    "val/2101": data(2101, "C"),
}


def folders(below: str) -> dict[str, Any]:
    """All of them, with their diagrams but for the 13th."""
    diagrams = [f"{below}{name}/img_diagram.png" for name in FOLDERS if name != "train/13"]
    return {f"{below}{name}/data.json": row for name, row in FOLDERS.items()} | media(*diagrams)


def kept(below: str) -> tuple[list[Sample], list[Sample]]:
    options = ("A. 5", "B. 6", "C. 6", "D. 7")
    return [
        replace(sample(12, f"{below}train/", "A"), options=options),
        sample(7, f"{below}train/", "B"),
        sample(8, f"{below}train/", "A", "Area, Length"),
        sample(9, f"{below}train/", "D", "geometry3k"),
    ], [sample(2401, f"{below}test/", "C")]


# In the order of their folders' names as text.
REFUSED = [
    ("data.json:1", "10", "answer_not_in_options"),
    ("data.json:1", "11", "bad_options"),
    ("data.json:1", "13", "missing_media"),
    ("data.json:1", "14", "missing_field"),
]
BLACK, RED, GREEN, GREY, BLUE = picture(0), picture(200), picture(50), picture(70), picture(90, "jpeg")
TEXT = datasets.Value("string")
OLDER = datasets.Features({"images": datasets.List(datasets.Image()), "problem": TEXT, "answer": TEXT})
NEWER = datasets.Features(OLDER | {"choices": datasets.List(TEXT), "ground_truth": TEXT})


def row(*pictures: bytes, answer: str = r"5 \sqrt { 2 }", **newer: Any) -> dict[str, Any]:
    images = [{"bytes": one, "path": None} for one in pictures]
    return {"images": images, "problem": f"{'<image>' * len(pictures)}Find $x$.", "answer": answer, **newer}


def with_letter(letter: str) -> dict[str, Any]:
    return {"choices": CHOICES, "ground_truth": letter}


def written(name: str, answer: str, *paths: str) -> Sample:
    refs = tuple(MediaRef("image", path) for path in paths)
    return Sample(name, "Find $x$.", refs, (), answer, "mathematics", "geometry3k", "geometry3k")


def shard(split: str) -> str:
    return f"data/{split}-00000-of-00001.parquet"


TRAIN = [
    row(BLACK, **with_letter("B")),
    row(RED, BLUE, answer="10", **with_letter("D")),
    row(BLACK, **with_letter("C")),
    row(**with_letter("B")),
    row(b"no picture", **with_letter("B")),
    row(BLACK, **with_letter("E")),
    row(GREY, answer=COMPACT[1], **with_letter("B")),
]
ROOT = r"5 \sqrt { 2 }"
OF_TRAIN = "train-00000-of-00001.parquet"

CASES = {
    "InterGPS": Published(folders("data/geometry3k/"), *kept("data/geometry3k/"), REFUSED),
    "Parquet": Published(
        {shard("train"): (TRAIN, NEWER), shard("test"): ([row(GREEN, **with_letter("B"))], NEWER)},
        [
            written("raw-train-1", ROOT, stored(BLACK)),
            written("raw-train-2", "10", stored(RED), stored(BLUE, ".jpg")),
            written("raw-train-7", COMPACT[1], stored(GREY)),
        ],
        [written("raw-test-1", ROOT, stored(GREEN))],
        [
            (f"{OF_TRAIN}:3", "raw-train-3", "ambiguous_answer"),
            (f"{OF_TRAIN}:4", "raw-train-4", "missing_field"),
            (f"{OF_TRAIN}:5", "raw-train-5", "unreadable_media"),
            (f"{OF_TRAIN}:6", "raw-train-6", "answer_not_in_options"),
        ],
        forms=(1,),
        unpacked=[BLACK, RED, BLUE, GREY, GREEN],
    ),
    "Parquet without choices, validation by name": Published(
        {shard("train"): ([row(BLACK, answer=r"30 ^ { \circ }")], OLDER), shard("validation"): ([row(RED)], OLDER)},
        [written("raw-train-1", r"30 ^ { \circ }", stored(BLACK))],
        [written("raw-validation-1", ROOT, stored(RED))],
        arguments=("--train", "{}:train", "--eval", "{}:validation", "--media-root", "{}"),
        forms=(1,),
        unpacked=[BLACK, RED],
    ),
}

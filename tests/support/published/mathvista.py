"""MathVista: an object of questions by pid, images beside it; AI4Math/MathVista's Parquet, images inside."""

from __future__ import annotations

from typing import Any

import datasets

from tests.support.published.case import Published, image, media, picture, stored
from vlm_pg.types import AnswerKind, MediaRef, Sample

TASK: dict[str, Any] = {"task": "figure question answering", "source": "FigureQA", "split": "testmini"}
TASK |= {
    "category": "general-vqa",
    "context": "scatter plot",
    "grade": "daily life",
    "skills": ["statistical reasoning"],
}
KEPT_OF_TASK = {name: TASK[name] for name in ("task", "context", "grade", "skills", "category")}


def question_row(pid: str, kind: str, answer: Any, **changes: Any) -> dict[str, Any]:
    chosen = kind == "multi_choice"
    question = {"question": "What is the mean?", "image": f"images/{pid}.jpg", "choices": None, "unit": None}
    question |= {"precision": None, "answer": answer, "question_type": kind if chosen else "free_form", "pid": pid}
    return question | {"answer_type": "text" if chosen else kind, "metadata": TASK, "query": "Hint: ..."} | changes


ROWS = [
    question_row("1", "multi_choice", "yes", choices=["no", "yes"]),
    question_row("2", "integer", "14"),
    question_row("3", "float", "1.2", precision=1.0, unit="$"),
    question_row("4", "float", "0.36", precision=2.0),
    question_row("5", "list", "[2014, 2016]"),
    question_row("6", "integer", "-3", unit="cm"),
    question_row("7", "multi_choice", "3", choices=["2", "2", "3"]),
    question_row("8", "multi_choice", "2", choices=["2", "2", "3"]),
    question_row("9", "multi_choice", "maybe", choices=["no", "yes"]),
    question_row("10", "float", "0.123", precision=3.0),
    question_row("11", "integer", "1.5"),
    question_row("12", "list", "2014"),
    question_row("13", "integer", ""),
    question_row("14", "boolean", "true"),
]
ROUND = "Round the answer to"
LISTED = "Answer with a list in square brackets, for example [1, 2, 3]."
REASONS = [
    ("8", "ambiguous_answer"),
    ("9", "answer_not_in_options"),
    ("10", "unknown_precision"),
    ("11", "no_gold_answer"),
    ("12", "no_gold_answer"),
    ("13", "no_gold_answer"),
    ("14", "unknown_question_type"),
]


def sample(
    pid: str, ref: tuple[MediaRef, ...], kind: AnswerKind, answer: str, more: str = "", options: tuple[str, ...] = ()
) -> Sample:
    published = ROWS[int(pid) - 1]
    names = ("question", "question_type", "answer_type", "precision", "unit", "choices")
    details = {name: published[name] for name in names if published[name] is not None} | KEPT_OF_TASK
    return Sample(
        pid, f"What is the mean?{more}", ref, options, answer, kind, "mathvista", TASK["task"], details=details
    )


def kept(*refs: tuple[MediaRef, ...]) -> list[Sample]:
    """Of the first seven rows, whose pictures these are."""
    return [
        sample("1", refs[0], "multiple_choice", "B", options=("A. no", "B. yes")),
        sample("2", refs[1], "numerical", "14"),
        sample("3", refs[2], "numerical", "1.2", f" (Unit: $)\n{ROUND} 1 decimal place."),
        sample("4", refs[3], "numerical", "0.36", f"\n{ROUND} 2 decimal places."),
        sample("5", refs[4], "exact", "[2014, 2016]", f"\n{LISTED}"),
        sample("6", refs[5], "numerical", "-3", " (Unit: cm)"),
        sample("7", refs[6], "multiple_choice", "C", options=("A. 2", "B. 2", "C. 3")),
    ]


def by_pid(below: str) -> list[Sample]:
    return kept(*(image(f"{below}images/{pid}.jpg") for pid in range(1, 8)))


OBJECT = {row["pid"]: row for row in ROWS}
GONE = {"15": question_row("15", "integer", "4")}
IMAGES = [f"images/{pid}.jpg" for pid in [*OBJECT, "16"]]
REFUSED = [(f"testmini.json:1, record {pid}", pid, reason) for pid, reason in REASONS]
MISSING = ("testmini.json:1, record 15", "15", "missing_media")
TEXT = datasets.Value("string")
FEATURES = datasets.Features(
    dict.fromkeys(("pid", "question", "image", "unit", "answer", "question_type", "answer_type", "query"), TEXT)
    | {"decoded_image": datasets.Image(), "choices": datasets.List(TEXT), "precision": datasets.Value("float64")}
    | {"metadata": dict.fromkeys(TASK, TEXT) | {"skills": datasets.List(TEXT)}}
)
SHARD = "testmini-00000-of-00001-725687bf7a18d64b.parquet"
PICTURES = [picture(10 * number, "jpeg") for number in range(len(ROWS))]
INSIDE = [
    row | {"decoded_image": {"bytes": content, "path": None}} for row, content in zip(ROWS, PICTURES, strict=True)
]

CASES = {
    "object by pid": Published(
        {"data/testmini.json": OBJECT | GONE, **media(*(f"data/{name}" for name in IMAGES))},
        (),
        by_pid("data/"),
        [*REFUSED, MISSING],
    ),
    "Parquet": Published(
        {f"data/{SHARD}": (INSIDE, FEATURES)},
        (),
        kept(*(image(stored(content, ".jpg")) for content in PICTURES[:7])),
        [(f"{SHARD}:{pid}", pid, reason) for pid, reason in REASONS],
        forms=(1,),
        unpacked=PICTURES[:7],
    ),
}

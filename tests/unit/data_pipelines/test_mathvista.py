"""MathVista's two forms become the same evaluation records; answers are scored as it does, or more strictly."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from data_pipelines import mathvista
from data_pipelines.mathvista import MATHVISTA
from tests.support.pipeline_rows import check_example, check_odd_rows, one_row, parted
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.types import BadSample, MediaRef, Sample

METADATA = {"task": "figure question answering", "source": "FigureQA", "split": "testmini"}


def question(kind: str, answer: Any, **changes: Any) -> dict[str, Any]:
    is_choice = kind == "multi_choice"
    return {
        "question": "What is the mean?", "image": "images/7.jpg", "choices": None, "unit": None, "precision": None,
        "answer": answer, "question_type": kind if is_choice else "free_form", "pid": "7",
        "answer_type": "text" if is_choice else kind, "metadata": METADATA, "query": "Hint: ...",
    } | changes  # fmt: skip


FLOAT = question("float", "1.2", precision=1.0, unit="$")
KEPT = {
    "1": question("multi_choice", "yes", choices=["no", "yes"]),
    "2": question("integer", "14"),
    "7": FLOAT,
    "4": question("float", "0.36", precision=2.0),
    "5": question("list", "[2014, 2016]"),
    "6": question("text", "blue"),
    "8": question("multi_choice", "3", choices=["2", "2", "3"]),
}
REFUSED = {
    "no_gold_answer": question("integer", ""),
    "answer_not_in_options": question("multi_choice", "maybe", choices=["no", "yes"]),
    "ambiguous_answer": question("multi_choice", "2", choices=["2", "2", "3"]),
    "unknown_precision": question("float", "0.123", precision=3.0),
    "unknown_question_type": question("boolean", "true"),
    "missing_field": question("multi_choice", "yes"),
}
EXPECTED = {
    "1": ("What is the mean?", ("A. no", "B. yes"), "B", "multiple_choice"),
    "2": ("What is the mean?", (), "14", "numerical"),
    "7": ("What is the mean? (Unit: $)\nRound the answer to 1 decimal place.", (), "1.2", "numerical"),
    "4": ("What is the mean?\nRound the answer to 2 decimal places.", (), "0.36", "numerical"),
    "5": (
        "What is the mean?\nAnswer with a list in square brackets, for example [1, 2, 3].",
        (),
        "[2014, 2016]",
        "exact",
    ),
    "6": ("What is the mean?", (), "blue", "exact"),
    "8": ("What is the mean?", ("A. 2", "B. 2", "C. 3"), "C", "multiple_choice"),
}


def described(samples: list[Sample]) -> dict[str, Any]:
    return {one.sample_id: (one.question, one.options, one.answer, one.answer_kind) for one in samples}


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "jpeg")
    return file.getvalue()


def test_testmini_json_and_its_images(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    (data / "images" / "7.jpg").write_bytes(jpeg())
    (tmp_path / "old" / "images").mkdir(parents=True)
    (tmp_path / "old" / "images" / "7.jpg").write_bytes(jpeg())  # of whatever else lies there
    rows = {**KEPT, **{f"refused{number}": row for number, row in enumerate(REFUSED.values())}}
    # What stands in the object's names is the pid, too.
    (data / "testmini.json").write_text(json.dumps({pid: {**row, "pid": pid} for pid, row in rows.items()}))
    samples, refused = parted(MATHVISTA, data / "testmini.json", root=tmp_path)
    assert described(samples) == EXPECTED
    assert {one.media for one in samples} == {(MediaRef("image", "data/images/7.jpg"),)}
    assert {one.category for one in samples} == {"figure question answering"}
    assert [one.reason for one in refused] == list(REFUSED)
    (in_place, *_), _ = parted(MATHVISTA, data / "testmini.json", root=data)
    assert in_place.media == (MediaRef("image", "images/7.jpg"),)


def test_parquet_with_pictures_inside(tmp_path: Path) -> None:
    text = datasets.Value("string")
    names = ("pid", "question", "image", "unit", "answer", "question_type", "answer_type", "query")
    features = datasets.Features(
        dict.fromkeys(names, text)
        | {"decoded_image": datasets.Image(), "choices": datasets.List(text), "precision": datasets.Value("float64")}
        | {"metadata": dict.fromkeys(METADATA, text)}
    )
    rows = [
        {**row, "pid": pid, "choices": row["choices"] or [], "decoded_image": {"bytes": jpeg(), "path": None}}
        for pid, row in KEPT.items()
    ]
    (tmp_path / "data").mkdir()
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "data" / "testmini-00000-of-00001-725687bf7a18d64b.parquet")
    samples, refused = parted(MATHVISTA, Path(f"{tmp_path}:testmini"), root=tmp_path)
    assert described(samples) == EXPECTED and not refused
    assert {(tmp_path / one.media[0].path).read_bytes() for one in samples} == {jpeg()}


@pytest.mark.parametrize(
    ("pid", "answer", "accuracy"),
    [
        ("2", "14", 1.0), ("2", "14.0", 1.0), ("2", "15", 0.0), ("7", "1.2", 1.0), ("7", "1.3", 0.0),
        ("4", "0.36", 1.0), ("4", "0.4", 0.0), ("4", "0.363", 1.0), ("5", "[2014, 2016]", 1.0),
        ("5", "[2016, 2014]", 0.0), ("5", "2014", 0.0), ("6", "Blue", 1.0), ("1", "B", 1.0), ("1", "yes", 1.0),
        ("1", "no", 0.0), ("8", "A", 0.0),
    ],
)  # fmt: skip
def test_answers_are_scored_as_mathvista_rounds_and_compares_them(pid: str, answer: str, accuracy: float) -> None:
    (sample,) = one_row(MATHVISTA, KEPT[pid])
    assert isinstance(sample, Sample)
    with Rewarder(RewardSettings()) as rewarder:
        (scored,) = rewarder.score([Response(sample, f"<think>so</think><answer>{answer}</answer>")])
    assert scored.parts["accuracy"] == accuracy


@pytest.mark.parametrize("changes", [{"precision": None}, {"precision": 1.5}, {"answer": "1.25"}, {"precision": "one"}])
def test_a_number_that_does_not_fit_its_precision_is_refused(changes: dict[str, Any]) -> None:
    (one,) = one_row(MATHVISTA, FLOAT | changes)
    assert isinstance(one, BadSample) and one.reason == "unknown_precision"


@pytest.mark.parametrize(
    ("kind", "answer"), [("integer", "14.5"), ("integer", "fourteen"), ("float", "1,2"), ("list", "3")]
)
def test_an_answer_of_another_type_is_refused(kind: str, answer: str) -> None:
    (one,) = one_row(MATHVISTA, question(kind, answer, precision=1.0))
    assert isinstance(one, BadSample) and one.reason == "no_gold_answer"


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(mathvista, FLOAT)


def test_details_are_what_is_published_without_what_is_added_to_the_question() -> None:
    more = METADATA | {"context": "table", "grade": "high school", "skills": ["algebraic reasoning"], "category": "vqa"}
    rows = (FLOAT | {"metadata": more}, KEPT["1"] | {"metadata": None}, KEPT["1"] | {"choices": ["yes", "n" * 2_000]})
    price, choice, long = (one for row in rows for one in one_row(MATHVISTA, row))
    assert isinstance(price, Sample) and isinstance(choice, Sample) and isinstance(long, Sample)
    assert price.details == {
        "question": "What is the mean?", "question_type": "free_form", "answer_type": "float", "precision": 1.0,
        "unit": "$", "task": "figure question answering", "context": "table", "grade": "high school",
        "skills": ["algebraic reasoning"], "category": "vqa",
    }  # fmt: skip
    assert choice.details == {
        "question": "What is the mean?", "question_type": "multi_choice", "answer_type": "text",
        "choices": ["no", "yes"],
    }  # fmt: skip
    assert "choices" not in long.details and len(long.options) == 2


@pytest.mark.parametrize("pid", KEPT)
def test_odd_rows_are_refused(pid: str) -> None:
    refused = dict(check_odd_rows(MATHVISTA, KEPT[pid]))
    assert refused["answer=''"].reason == "no_gold_answer" and refused["image=[]"].reason == "wrong_type"

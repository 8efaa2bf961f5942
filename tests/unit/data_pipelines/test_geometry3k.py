"""Geometry3K: InterGPS' folders become multiple choice, hiyouga's Parquet mathematics with its images unpacked."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from data_pipelines import geometry3k
from data_pipelines.geometry3k import GEOMETRY3K
from tests.support.pipeline_rows import check_odd_rows, example, one_row, parted
from vlm_pg.answers.mathematics import compare
from vlm_pg.errors import ConfigError
from vlm_pg.types import BadSample, MediaRef, Sample

CHOICES = ["5", r"5 \sqrt { 2 }", r"5 \sqrt { 3 }", "10"]
DATA = {
    "problem_text": "Find $x$.", "choices": CHOICES, "answer": "B", "id": 2401, "problem_type_goal": ["Length"],
    "compact_choices": CHOICES, "precise_value": [5.0, 7.07, 8.66, 10.0],
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "answer_not_in_options": {**DATA, "answer": "E"},
    "bad_options": {**DATA, "choices": ["5", "5", "6", "7"]},
    "wrong_type": {**DATA, "choices": [5, 6, 7, 8]},
}


def png(shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (shade, 0, 0)).save(file, "png")
    return file.getvalue()


def folder(root: Path, number: int, data: dict[str, Any]) -> Path:
    file = root / "data" / "geometry3k" / "test" / str(number) / "data.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(data))
    (file.parent / "img_diagram.png").write_bytes(png())
    return file


def test_folders_of_intergps(tmp_path: Path) -> None:
    plain = {name: DATA[name] for name in ("problem_text", "choices", "answer")}
    rows = [DATA, plain, *REFUSED.values()]
    files = [folder(tmp_path, 2401 + number, row) for number, row in enumerate(rows)]
    (tmp_path / "old" / "test" / "2401").mkdir(parents=True)
    (tmp_path / "old" / "test" / "2401" / "img_diagram.png").write_bytes(png())  # of whatever else lies there
    samples, refused = parted(GEOMETRY3K, *files, root=tmp_path)
    options = ("A. 5", r"B. 5 \sqrt { 2 }", r"C. 5 \sqrt { 3 }", "D. 10")
    assert [replace(sample, where="") for sample in samples] == [
        Sample(name, "Find $x$.", (MediaRef("image", f"data/geometry3k/test/{name}/img_diagram.png"),), options, "B",
               "multiple_choice", "geometry3k", category)
        for name, category in (("2401", "Length"), ("2402", "geometry3k"))
    ]  # fmt: skip
    assert [one.reason for one in refused] == list(REFUSED)
    (unpacked,), _ = parted(GEOMETRY3K, files[0], root=tmp_path / "data" / "geometry3k")
    assert unpacked.media[0].path == "test/2401/img_diagram.png"
    assert replace(unpacked, where="") == example(geometry3k)


ROW = {"id": 7, "images": [], "problem": "<image>Find $x$.", "answer": CHOICES[1], "choices": CHOICES}


def test_parquet_of_hiyouga(tmp_path: Path) -> None:
    black, other = {"bytes": png(), "path": None}, {"bytes": png(9), "path": None}
    rows = [
        {**ROW, "images": [black], "ground_truth": "B"},
        {**ROW, "id": 8, "images": [black, other], "ground_truth": "B", "problem": "<image><image>Find $x$."},
        {**ROW, "id": 9, "images": [black], "ground_truth": "C"},
        {**ROW, "id": 10, "images": [], "ground_truth": "B"},
        {**ROW, "id": 11, "images": [{"bytes": b"no image", "path": None}], "ground_truth": "B"},
        {**ROW, "id": 12, "images": [black, other], "ground_truth": "B"},
    ]  # fmt: skip
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "choices": datasets.List(datasets.Value("string")),
            "ground_truth": datasets.Value("string"),
        }
    )
    (tmp_path / "data").mkdir()
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    table.remove_columns(["id", "choices", "ground_truth"]).to_parquet(
        tmp_path / "data" / "test-00000-of-00001.parquet"
    )
    media = tmp_path / "media"
    samples, refused = parted(GEOMETRY3K, Path(f"{tmp_path}:train"), root=media)
    assert [(one.sample_id, one.question, one.options, one.answer, one.answer_kind) for one in samples] == [
        (name, "Find $x$.", (), CHOICES[1], "mathematics") for name in ("7", "8")
    ]
    assert [(media / ref.path).read_bytes() for one in samples for ref in one.media] == [png(), png(), png(9)]
    reasons = ["ambiguous_answer", "missing_field", "unreadable_media", "media_mark_without_medium"]
    assert [one.reason for one in refused] == reasons
    older, _ = parted(GEOMETRY3K, Path(f"{tmp_path}:test"), root=media)
    assert [one.sample_id for one in older] == [f"{tmp_path.name}-test-{row}" for row in (1, 2, 3)]


@pytest.mark.parametrize(
    ("gold", "answer", "wrong"),
    [
        (r"5 \sqrt { 2 }", r"5\sqrt{2}", "7.07"),
        (r"\frac { 5 } { 12 }", "5/12", "12/5"),
        (r"4 \pi", r"4\pi", "4"),
        (r"30 ^ { \circ }", "30", "60"),
        ("5 : 6", "5:6", "6:5"),
    ],
)
def test_spaced_latex_is_compared_as_mathematics(gold: str, answer: str, wrong: str) -> None:
    (sample,) = one_row(GEOMETRY3K, {"images": "a.png", "problem": "<image>Find it.", "answer": gold}, form=1)
    assert isinstance(sample, Sample)
    assert [compare(sample.answer, one)[0] for one in (sample.answer, answer, wrong)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("choice", "answer", "is_kept"),
    [
        (r"5 \sqrt { 2 }", r"5\sqrt{2}", True),
        (r"5 \sqrt { 2 }", r"$5 \sqrt{2}$", True),
        (r"\frac { 1 } { 2 }", r"\frac12", True),
        (r"30 ^ { \circ }", r"30^{\circ}", True),
        (r"5 \sqrt { 2 }", r"5 \sqrt { 3 }", False),
        ("12", "1 2", False),
        ("-5", "5", False),
    ],
)
def test_the_letter_leads_to_the_answer_in_any_spelling(choice: str, answer: str, is_kept: bool) -> None:
    row = {"images": "a.png", "problem": "<image>Find it.", "answer": answer, "choices": ["7", choice]}
    (one,) = one_row(GEOMETRY3K, {**row, "ground_truth": "B"}, form=1)
    if is_kept:
        assert isinstance(one, Sample) and one.answer == answer
    else:
        assert isinstance(one, BadSample) and one.reason == "ambiguous_answer"


def test_a_table_of_more_rows_than_the_set_has_is_another_set(tmp_path: Path) -> None:
    """BUAADreamer/clevr_count_70k has the same fields."""
    row = {"images": "a.png", "problem": "<image>How many?", "answer": "3"}
    for count in (3302, 3303):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * count), tmp_path / f"{count}.parquet")
    _, form = GEOMETRY3K.forms
    assert len(list(form.rows(tmp_path / "3302.parquet"))) == 3302
    with pytest.raises(ConfigError, match="has more than 3302 rows"):
        list(form.rows(tmp_path / "3303.parquet"))


@pytest.mark.parametrize("form", [0, 1])
def test_odd_rows_are_refused(form: int) -> None:
    row = {**DATA, "file": "/geometry3k/test/2401/data.json"}
    row = row if form == 0 else {**ROW, "images": ["a.png"], "ground_truth": "B"}
    refused = dict(check_odd_rows(GEOMETRY3K, row, form))
    assert refused["choices=[None]"].reason == refused["answer=True"].reason == "wrong_type"
    assert refused["without answer"].reason == "missing_field"

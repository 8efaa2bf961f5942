"""MATH, MATH-500 and rows written like them, in each published form, become the expected records of mathematics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import math
from data_pipelines.math import MATH, last_boxed
from tests.support.pipeline_rows import check_odd_rows, example, one_row, parted, write_lines
from vlm_pg.errors import ConfigError
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, Sample

HALF = {"problem": "Half of one?", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."}
UNBOXED = {"problem": "What?", "level": "Level ?", "type": "Algebra", "solution": "Nobody knows."}
OF_500 = {
    "unique_id": "test/number_theory/7.json", "problem": "One and one?", "level": 1, "subject": "Number Theory",
    "solution": r"$\boxed{2.0}$", "answer": "2",
}  # fmt: skip


def math_sample(name: str) -> Sample:
    return Sample(
        name, "Half of one?", (), (), r"\frac{1}{2}", "mathematics", "math", "Algebra", process=HALF["solution"],
        details={"subject": "Algebra", "level": "Level 1"},
    )  # fmt: skip


def test_one_object_a_file(tmp_path: Path) -> None:
    files = [tmp_path / "MATH" / "train" / "algebra" / f"{number}.json" for number in (1, 2)]
    files[0].parent.mkdir(parents=True)
    for file, row in zip(files, (HALF, UNBOXED), strict=True):
        file.write_text(json.dumps(row))
    samples, refused = parted(MATH, *files)
    assert [replace(sample, where="") for sample in samples] == [math_sample("train/algebra/1.json")]
    assert [(one.sample_id, one.reason) for one in refused] == [("train/algebra/2.json", "no_gold_answer")]
    (tmp_path / "1.json").write_text(json.dumps(HALF))
    (elsewhere,), _ = parted(MATH, tmp_path / "1.json")
    assert elsewhere.sample_id == "1-1"
    assert replace(samples[0], where="") == example(math)


def test_parquet_of_subjects(tmp_path: Path) -> None:
    paths = []
    for subject in ("algebra", "geometry"):
        (tmp_path / subject).mkdir()
        table = pyarrow.Table.from_pylist([HALF, UNBOXED])
        pyarrow.parquet.write_table(table, tmp_path / subject / "train-00000-of-00001.parquet")
        paths.append(Path(f"{tmp_path / subject}:train"))
    samples, refused = parted(MATH, *paths)
    expected = [math_sample("algebra-train-1"), math_sample("geometry-train-1")]
    assert [replace(sample, where="") for sample in samples] == expected
    assert [one.sample_id for one in refused] == ["algebra-train-2", "geometry-train-2"]


def test_rows_of_math_500_keep_their_name_and_their_answer(tmp_path: Path) -> None:
    (sample,), refused = parted(MATH, write_lines(tmp_path / "test.jsonl", [OF_500]))
    assert not refused and replace(sample, where="") == Sample(
        "test/number_theory/7.json", "One and one?", (), (), "2", "mathematics", "math", "Number Theory",
        process=r"$\boxed{2.0}$",
        details={"subject": "Number Theory", "level": 1, "unique_id": "test/number_theory/7.json"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"id": 3, "problem": "1 + 1?", "answer": 142.0, "url": "u"}, "142"),
        ({"id": 3, "question": "1 + 1?", "answer": "27", "url": "u"}, "27"),
        ({"ID": "2024-I-1", "Problem": "1 + 1?", "Solution": "So \\boxed{204}.", "Answer": 204}, "204"),
        ({"problem": "1 + 1?", "solution": "So \\boxed{204}.", "answer": None}, "204"),
        ({"problem": "1 + 1?", "answer": "0"}, "0"),
        ({"problem": "1 + 1?", "answer": 0}, "0"),
    ],
)
def test_rows_of_problems_and_plain_answers(row: dict[str, Any], answer: str) -> None:
    (sample,) = one_row(MATH, row, form=2)
    assert isinstance(sample, Sample)
    assert (sample.sample_id, sample.question, sample.answer) == ("rows-1", "1 + 1?", answer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        # hiyouga/geometry3k, whose diagrams would be lost; MathVista; MMLU, of whose answer only the number would stay.
        ({"problem": "<image>Find $x$.", "answer": "3", "images": ["a.png"]}, "'images', as rows of sets with media"),
        ({"question": "What?", "answer": "3", "decoded_image": "a.png", "choices": None}, "'decoded_image', as rows"),
        ({"question": "What?", "answer": 1, "choices": ["3", "4"]}, "'choices', as rows of multiple choice sets"),
    ],
)
def test_sets_with_media_or_options_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"test.jsonl:1: the row has {message}"):
        parted(MATH, write_lines(tmp_path / "test.jsonl", [row]))
    mixed = write_lines(
        tmp_path / "test.jsonl", [row, {"problem": "1 + 1?", "answer": "2", "choices": [], "images": None}]
    )
    samples, refused = parted(MATH, mixed)
    assert [one.answer for one in samples] == ["2"] and [one.reason for one in refused] == ["other_data_set"]


def test_gsm8k_is_refused_and_a_source_that_rows_tell_is_kept() -> None:
    (one,) = one_row(MATH, {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}, form=2)
    assert isinstance(one, BadSample) and one.reason == "other_data_set" and "vlm-pg prepare gsm8k" in one.message
    (numina,) = one_row(MATH, {"problem": "1 + 1?", "solution": r"\boxed{2}", "source": "aops_forum"}, form=2)
    assert isinstance(numina, Sample) and (numina.answer, numina.source) == ("2", "aops_forum")


def test_odd_rows_are_refused() -> None:
    in_file = dict(check_odd_rows(MATH, {**HALF, "file": "/MATH/train/algebra/1.json"}, form=1))
    assert in_file["without solution"].reason == "missing_field"
    assert in_file["solution=''"].reason == in_file["solution=7.5"].reason == "no_gold_answer"
    rows = dict(check_odd_rows(MATH, OF_500))
    for gold in ("[]", "{}", "True", "[None]"):
        assert rows[f"answer={gold}"].reason == "wrong_type", "whatever the solution says"
    assert rows["answer=' '"].reason == "no_gold_answer" and rows["answer=nan"].reason == "wrong_type"


@pytest.mark.parametrize(
    ("solution", "boxed"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed {3}", "3"),
        (r"$\boxed 3$", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{5", None),
        (r"\boxed{}", None),
        (r"\boxed", None),
        ("5", None),
    ],
)
def test_the_last_box_of_a_solution(solution: str, boxed: str | None) -> None:
    assert last_boxed(solution) == boxed


def test_the_real_rows_and_the_last_boxes_of_their_solutions(data_dir: Path) -> None:
    samples, refused = parted(MATH, data_dir / "math500_test.jsonl")
    assert len(samples) == 500 and not refused
    assert len({sample.category for sample in samples}) == 7
    different = [one.answer for one in samples if (last_boxed(one.process) or "").strip() != one.answer]
    assert len(different) < 5, "a few answers are written more simply than in the solution"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.matrix) for part in range(1, 10))])
def test_the_real_golds_earn_the_full_reward(data_dir: Path, part: int) -> None:
    samples, _ = parted(MATH, data_dir / "math500_test.jsonl")
    chosen = samples[part::10]
    faults = [(one.answer, fault) for one, fault in zip(chosen, gold_faults(chosen), strict=True) if fault]
    assert not faults


def test_a_solution_without_a_box_says_so() -> None:
    (refused,) = one_row(MATH, UNBOXED, form=2)
    assert isinstance(refused, BadSample) and refused.reason == "no_gold_answer"
    assert "no 'answer' and no \\boxed{...} in 'Nobody knows.'" in refused.message

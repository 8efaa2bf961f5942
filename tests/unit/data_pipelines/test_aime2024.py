"""AIME 2024 in its published forms becomes the same records, one for each problem; answers are 0 to 999."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipelines import aime2024
from data_pipelines.aime2024 import AIME2024
from tests.support.pipeline_rows import check_example, check_odd_rows, kept, one_row, parted, write_lines
from vlm_pg.errors import ConfigError
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, Sample

URL = "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1"
ROW = {"id": 60, "problem": "How long?", "solution": "So.", "answer": "025", "url": URL, "year": "2024"}
CAPITALS = {"ID": "2024-II-4", "Problem": "Let $x,y$ and $z$ be positive real numbers ...", "Solution": "Denote ..."}
CAPITALS |= {"Answer": 33}
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
PROMPT = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": f"{BEFORE}How long?{AFTER}"}],
    "reward_model": {"ground_truth": "204", "style": "rule"},
    "extra_info": {"index": 7},
}


@pytest.mark.parametrize(
    ("answer", "gold"), [("025", "25"), ("000", "0"), ("204", "204"), (33, "33"), (33.0, "33"), ("999", "999")]
)
def test_an_answer_is_a_whole_number_without_leading_zeros(answer: Any, gold: str) -> None:
    (one,) = one_row(AIME2024, ROW | {"answer": answer}, form=1)
    assert isinstance(one, Sample) and one.answer == gold and one.process == "So."
    assert one.details == {"id": 60, "url": URL}
    assert list(gold_faults([one])) == [None]


@pytest.mark.parametrize("answer", ["1000", -1, "-1", "", None, "12.5", "m+n", "#### 25"])
def test_any_other_answer_is_refused(answer: Any) -> None:
    (one,) = one_row(AIME2024, ROW | {"answer": answer}, form=1)
    assert isinstance(one, BadSample) and one.reason == "no_gold_answer"


@pytest.mark.parametrize(
    "changes", [{"year": "2023"}, {"year": 2022}, {"url": URL.replace("2024", "2022"), "year": None}]
)
def test_problems_of_another_year_are_another_sets(changes: dict[str, Any]) -> None:
    (one,) = one_row(AIME2024, ROW | changes, form=1)
    assert isinstance(one, BadSample) and one.reason == "other_data_set"


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(aime2024, CAPITALS, form=1)


@pytest.mark.parametrize(
    "more", [{"index": 7}, {"index": 7, "raw_problem": ""}, {"index": 7, "raw_problem": "How long?"}]
)
def test_a_prompt_is_the_problem_without_what_stands_around_it(more: dict[str, Any]) -> None:
    (sample,) = one_row(AIME2024, PROMPT | {"extra_info": more})
    assert isinstance(sample, Sample)
    assert (sample.question, sample.answer, sample.details) == ("How long?", "204", {"id": 7})


def test_of_repeated_problems_the_first_is_kept(tmp_path: Path) -> None:
    other = PROMPT | {"prompt": [{"role": "user", "content": f"{BEFORE}How  wide?{AFTER}"}]}
    spaced = PROMPT | {"prompt": [{"role": "user", "content": f"{BEFORE}How wide?\n{AFTER}"}]}
    samples = kept(AIME2024, write_lines(tmp_path / "aime.jsonl", [PROMPT, other, PROMPT, spaced, PROMPT]))
    assert [one.sample_id for one in samples] == ["aime-1", "aime-2"]


def test_damaged_rows_are_refused_each_and_not_taken_for_repeated_ones(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "aime.jsonl", [PROMPT, *[PROMPT | {"prompt": []}] * 2, 7, PROMPT])
    samples, refused = parted(AIME2024, path)
    assert len(samples) == 1
    assert [one.reason for one in refused] == ["bad_conversation", "bad_conversation", "not_a_record"]


@pytest.mark.parametrize("field", ["unique_id", "choices", "image"])
def test_rows_of_similar_sets_are_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"the row has '{field}', as rows of "):
        parted(AIME2024, write_lines(tmp_path / "test.jsonl", [ROW | {field: ["x"]}]))


def test_odd_rows_are_refused() -> None:
    for row in (ROW, CAPITALS):
        refused = dict(check_odd_rows(AIME2024, row, form=1))
        assert refused[f"without {'answer' if row is ROW else 'Answer'}"].reason == "missing_field"
    refused = dict(check_odd_rows(AIME2024, PROMPT))
    assert refused["reward_model=7.5"].reason == refused["prompt=7.5"].reason == "wrong_type"
    assert refused["prompt=[]"].reason == "bad_conversation"
    assert refused["without reward_model.ground_truth"].reason == "no_gold_answer"

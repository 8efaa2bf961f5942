"""AMC 2023 in both published forms becomes the same records; answers are whole numbers however they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipelines import amc2023
from data_pipelines.amc2023 import AMC2023
from tests.support.pipeline_rows import check_example, check_odd_rows, one_row, parted, write_lines
from vlm_pg.errors import ConfigError
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, Sample

URL = "https://artofproblemsolving.com/wiki/index.php/2023_AMC_12A_Problems/Problem_1"
ROW = {"id": 0, "question": "Cities $A$ and $B$ are $45$ miles apart. ...", "answer": "27", "url": URL}


@pytest.mark.parametrize(
    ("answer", "gold"), [("27", "27"), (27.0, "27"), (27, "27"), ("27.0", "27"), (-1.0, "-1"), ("0", "0"), (0.0, "0")]
)
def test_an_answer_is_a_whole_number_however_it_is_written(answer: Any, gold: str) -> None:
    (one,) = one_row(AMC2023, ROW | {"answer": answer})
    assert isinstance(one, Sample) and one.answer == gold


@pytest.mark.parametrize("answer", ["", None, "1/2", 2.5, "27.5", "27 miles", "A", "#### 27", "1e3", "9" * 400])
def test_any_other_answer_is_refused(answer: Any) -> None:
    (one,) = one_row(AMC2023, ROW | {"answer": answer})
    assert isinstance(one, BadSample) and one.reason == "no_gold_answer"


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(amc2023, ROW, sample_id="0")


def test_minus_one_earns_the_reward_and_one_does_not() -> None:
    (sample,) = one_row(AMC2023, ROW | {"answer": -1.0})
    assert isinstance(sample, Sample) and list(gold_faults([sample])) == [None]
    with Rewarder(RewardSettings()) as rewarder:
        (scored,) = rewarder.score([Response(sample, "<think>so</think><answer>$1$</answer>")])
    assert scored.parts["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("url", "kept"), [(URL, True), (None, True), ("", True), (URL.replace("2023_AMC", "2022_AMC"), False), (7, True)]
)
def test_problems_of_another_year_are_another_sets(url: Any, kept: bool) -> None:
    (one,) = one_row(AMC2023, ROW | {"url": url})
    assert isinstance(one, Sample) if kept else isinstance(one, BadSample) and one.reason == "other_data_set"


@pytest.mark.parametrize("field", ["solution", "choices", "image"])
def test_rows_of_similar_sets_are_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"the row has '{field}', as rows of .*sets"):
        parted(AMC2023, write_lines(tmp_path / "test.jsonl", [ROW | {field: ["x"]}]))


def test_odd_rows_are_refused() -> None:
    refused = dict(check_odd_rows(AMC2023, ROW))
    assert refused["without question"].reason == refused["without answer"].reason == "missing_field"
    assert refused["answer=[]"].reason == refused["question=7.5"].reason == "wrong_type"

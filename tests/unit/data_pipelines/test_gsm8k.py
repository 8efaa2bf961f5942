"""GSM8K in each published form becomes the same numerical records; what has no number is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import gsm8k
from data_pipelines.gsm8k import GSM8K
from tests.support.pipeline_rows import check_odd_rows, example, one_row, parted, write_lines
from vlm_pg.errors import ConfigError
from vlm_pg.types import BadSample, Sample

ROWS = [
    {"question": "How many in all?", "answer": "It is 3*4 = <<3*4=12>>12.\n#### 12"},
    {"question": "How much?", "answer": "Much.\n#### 2,125"},
    {"question": "What change?", "answer": "Less.\n#### -10"},
]


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    row = {"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 ...\n#### 72"}
    (sample,) = one_row(GSM8K, row)
    assert isinstance(sample, Sample)
    assert replace(sample, where="", sample_id="train-17") == example(gsm8k)


def test_odd_rows_are_refused() -> None:
    refused = dict(check_odd_rows(GSM8K, ROWS[0]))
    assert refused["without question"].reason == refused["without answer"].reason == "missing_field"
    assert refused["answer=''"].reason == "no_gold_answer" and refused["question=7.5"].reason == "wrong_type"


@pytest.mark.parametrize("gold", ["#### about seven", "no number", "#### ", "1e400", "#### 7 #### 8 or 9"])
def test_an_answer_without_one_number_is_refused(gold: str) -> None:
    (one,) = one_row(GSM8K, {"question": "How much?", "answer": gold})
    assert isinstance(one, BadSample) and one.reason == "no_gold_answer"


@pytest.mark.parametrize(("answer", "gold"), [("1,002", "1002"), (142.0, "142"), (-7, "-7")])
def test_rows_of_problems_and_plain_answers(answer: Any, gold: str) -> None:
    (one,) = one_row(GSM8K, {"problem": "1 + 1?", "answer": answer})
    assert isinstance(one, Sample) and (one.question, one.answer) == ("1 + 1?", gold)


def test_questions_with_options_are_another_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'options', as rows of multiple choice sets have"):
        parted(GSM8K, write_lines(tmp_path / "test.jsonl", [{"question": "?", "answer": 1, "options": ["3", "4"]}]))

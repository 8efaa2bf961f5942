"""Readers of whole outputs read choices, yes and no and short texts as the hand-graded tables do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.outputs import TABLES, questions
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

KINDS: dict[str, AnswerKind] = {"choice": "multiple_choice", "yes_no": "yes_no", "text": "exact"}
KNOWN_MISSES = {
    "mmvu-032": "the name of the algorithm in Chinese: needs translation",
    "video-mmmu-040": "the name of the fallacy in Chinese: needs translation",
    "mmvu-033": "that Dijkstra's algorithm and Dijkstra's shortest path algorithm are one is knowledge of the field",
}
EVERY = [
    (question, output)
    for path in TABLES
    for question in questions(path)
    if question["kind"] in KINDS
    for output in question["outputs"]
]


def sample_of(question: dict[str, Any]) -> Sample:
    options = tuple(f"{'ABCDEFGHIJ'[place]}. {text}" for place, text in enumerate(question.get("options", ())))
    return Sample("1", question["question"], (), options, question["gold"], KINDS[question["kind"]], "s", "c")


def read(question: dict[str, Any], output: dict[str, Any]) -> Reading:
    return WholeReader(RewardSettings()).read(sample_of(question), output["text"], output.get("truncated", False))


@pytest.mark.parametrize(
    "question,output", [pytest.param(*pair, id=pair[1]["id"]) for pair in EVERY if pair[1]["id"] not in KNOWN_MISSES]
)
def test_each_output_is_read_as_by_hand(question: dict[str, Any], output: dict[str, Any]) -> None:
    reading = read(question, output)
    assert reading.score == output["score"], output["why"]
    if question["kind"] != "text":
        assert reading.answer == (None if output["reads"] == "none" else output["reads"]), output["why"]
    else:
        assert (reading.answer is None) == (output["reads"] == "none"), output["why"]


@pytest.mark.parametrize("name", KNOWN_MISSES)
def test_known_misses_cost_a_right_answer_and_never_give_one(name: str) -> None:
    question, output = next(pair for pair in EVERY if pair[1]["id"] == name)
    assert output["score"] == 1
    assert read(question, output).score == 0.0


def test_there_are_as_many_outputs_as_the_tables_have_of_these_kinds() -> None:
    assert len(EVERY) == 429

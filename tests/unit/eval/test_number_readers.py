"""What a careful human reads in the hand-graded outputs is read: numbers, mathematics and spans of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import yaml

from tests.support.outputs import TABLES, questions
from vlm_pg.answers.grading import PREPARE
from vlm_pg.answers.pool import CheckerPool
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.expressions import as_interval
from vlm_pg.eval.reading.mathematics import Grade, grade_in, read_mathematics
from vlm_pg.eval.reading.number import read_number
from vlm_pg.eval.reading.span import read_span
from vlm_pg.eval.reading.thinking import said_in
from vlm_pg.rewards.settings import CheckerSettings
from vlm_pg.types import AnswerKind, Sample

Case = tuple[str, dict[str, Any], dict[str, Any]]
# No rule of language reads these; each with the reason.
KNOWN_MISSES: dict[str, str] = {}


def cases(kind: str) -> list[Any]:
    found = []
    for path in TABLES:
        for question in questions(path):
            if question["kind"] == kind:
                found += [pytest.param(path.stem, question, one, id=one["id"]) for one in question["outputs"]]
    return found


def sample_of(table: str, question: dict[str, Any], kind: AnswerKind, gold: str) -> Sample:
    details = {name: question[name] for name in ("unit", "precision", "answer_type") if name in question}
    return Sample("1", question["question"], (), (), gold, kind, table, "", details=details)


def value(text: str) -> Fraction:
    return Fraction(text.replace(" ", "")) if "/" in text else Fraction(text)


@pytest.mark.parametrize(("table", "question", "output"), cases("number"))
def test_numbers(table: str, question: dict[str, Any], output: dict[str, Any]) -> None:
    kind: AnswerKind = "mean_relative_accuracy" if table == "vsi_bench" else "numerical"
    sample = sample_of(table, question, kind, question["gold"])
    said = said_in(output["text"], output.get("truncated", False))
    reading = Reading(None, 0.0) if said is None else read_number(sample, said)
    if output["reads"] == "none":
        assert reading.answer is None
    elif not output["reads"].replace(".", "").replace("-", "").replace("/", "").isdigit():
        assert reading.answer == output["reads"]
    else:
        assert reading.answer is not None
        assert float(value(reading.answer.rstrip("%"))) == pytest.approx(float(value(output["reads"])), rel=1e-3)
    assert reading.score == output["score"]
    if "score_le" in output and said is not None:
        assert read_number(sample, said, ties_pass=True).score == output["score_le"]


@pytest.mark.parametrize(("table", "question", "output"), cases("span"))
def test_spans(table: str, question: dict[str, Any], output: dict[str, Any]) -> None:
    sample = sample_of(table, question, "time_span", str(question["gold"]))
    said = said_in(output["text"], output.get("truncated", False))
    reading = Reading(None, 0.0) if said is None else read_span(sample, said)
    if output["reads"] == "none":
        assert reading.answer is None
    else:
        assert reading.answer is not None
        assert yaml.safe_load(reading.answer) == pytest.approx(output["reads"], abs=1e-3)
    assert reading.score == pytest.approx(output["score"], abs=1e-4)


@pytest.fixture(scope="module")
def grade() -> Iterator[Grade]:
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=20), [PREPARE])
    yield grade_in(pool)
    pool.close()


@pytest.mark.parametrize(("table", "question", "output"), cases("math"))
def test_mathematics(table: str, question: dict[str, Any], output: dict[str, Any], grade: Grade) -> None:
    sample = sample_of(table, question, "mathematics", question["gold"])
    said = said_in(output["text"], output.get("truncated", False))
    reading = Reading(None, 0.0) if said is None else read_mathematics(sample, said, grade)
    assert reading.score == output["score"]
    if output["reads"] == "none" or reading.answer is None:
        return
    # The same result, however it is spelled; the base of a number may be named by the question alone.
    stated = replace(sample, answer=as_interval(output["reads"]).partition("_")[0])
    is_same = reading.answer.casefold() == output["reads"].casefold()
    assert is_same or grade(reading.answer.partition("_")[0], stated).value == 1.0

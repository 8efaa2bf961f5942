"""The hand-graded outputs are whole and agree with themselves: what readers are held against must be right first."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.outputs import TABLES, questions

KINDS = {"choice", "number", "math", "span", "yes_no", "text"}


def outputs_of(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(question, output) for question in questions(path) for output in question["outputs"]]


def mean_relative_accuracy(gold: str, read: str, strict: bool) -> float:
    error = abs(Fraction(read) - Fraction(gold)) / abs(Fraction(gold))
    limits = [1 - Fraction(50 + 5 * step, 100) for step in range(10)]
    return sum(error < limit if strict else error <= limit for limit in limits) / 10


def overlap(one: list[float], other: list[float]) -> float:
    both = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    return both / (max(one[1], other[1]) - min(one[0], other[0]))


def test_outputs_are_many_mostly_without_tags_and_have_ids_of_their_own() -> None:
    outputs = [output for path in TABLES for _, output in outputs_of(path)]
    bare = [one for one in outputs if not any(mark in one["text"] for mark in ("answer>", "\\boxed"))]
    assert len(TABLES) == 16 and len(outputs) >= 600 and len(bare) >= len(outputs) / 2
    assert len({one["id"] for one in outputs}) == len(outputs)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_each_verdict_follows_from_what_is_read(path: Path) -> None:
    for question, output in outputs_of(path):
        read, name = output["reads"], output["id"]
        assert question["kind"] in KINDS and output["why"] and isinstance(output["text"], str), name
        if read == "none":
            assert output["score"] == 0, name
        elif question["kind"] in ("choice", "yes_no"):
            allowed = "ABCDEFGHIJKLMNOP"[: len(question["options"])] if question["kind"] == "choice" else ("yes", "no")
            assert read in allowed and question["gold"] in allowed, name
            assert output["score"] == int(read == question["gold"]), name
        elif question["kind"] == "span":
            assert output["score"] == pytest.approx(overlap(read, question["gold"]), abs=1e-4), name
        elif "score_le" in output:
            assert output["score"] == mean_relative_accuracy(question["gold"], str(read), strict=True), name
            assert output["score_le"] == mean_relative_accuracy(question["gold"], str(read), strict=False), name
        else:
            assert output["score"] in (0, 1), name

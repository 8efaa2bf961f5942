"""Answered questions for the tests of figures, in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.types import AnswerKind, FinishReason


def output(
    score: float | None,
    answer: str | None = "A",
    *,
    counts: bool = True,
    finish_reason: FinishReason | None = "stop",
    num_tokens: int | None = None,
) -> Output:
    return Output(f"text of {answer}", Reading(answer, score, counts=counts), finish_reason, num_tokens)


def question(
    name: str,
    *outputs: Output | float,
    cluster: str = "",
    category: str = "c",
    options: Sequence[str] = ("A. x", "B. y"),
    kind: AnswerKind = "multiple_choice",
    fault: tuple[str, str] | None = None,
    gold: str = "A",
    details: Mapping[str, Any] | None = None,
) -> Answered:
    """A question and its outputs; a number stands for an output with that score. Its cluster is its own by default."""
    return Answered(
        sample_id=name,
        question=f"question {name}",
        options=tuple(options),
        gold=gold,
        kind=kind,
        category=category,
        cluster=cluster or name,
        details=details or {},
        outputs=tuple(one if isinstance(one, Output) else output(one) for one in outputs),
        fault=fault,
    )

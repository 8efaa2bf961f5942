"""Samples and responses for the reward tests."""

from __future__ import annotations

from vlm_pg.types import AnswerKind, Sample


def make_sample(kind: AnswerKind, answer: str, options: tuple[str, ...] = ()) -> Sample:
    return Sample("1", "Which?", (), options, answer, kind, source="test", category="test")


def respond(answer: str) -> str:
    return f"<think>because</think><answer>{answer}</answer>"

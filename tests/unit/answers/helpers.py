"""Samples and responses for the reward tests."""

from __future__ import annotations

from vlm_pg.types import AnswerKind, Sample

# A usable gold answer of each kind.
GOLD: dict[AnswerKind, str] = {
    "multiple_choice": "B",
    "multiple_select": "A, B",
    "numerical": "5",
    "ocr": "open the door",
    "free_form": "a person flips a pancake",
    "regression": "12.5",
    "mean_relative_accuracy": "12.5",
    "mathematics": "\\frac{1}{2}",
    "box": "[1, 2, 30, 40]",
    "time_span": "[1.5, 3]",
    "exact": "a red car",
    "yes_no": "yes",
}


def make_sample(kind: AnswerKind, answer: str, options: tuple[str, ...] = ()) -> Sample:
    return Sample("1", "Which?", (), options, answer, kind, source="test", category="test")


def respond(answer: str) -> str:
    return f"<think>because</think><answer>{answer}</answer>"

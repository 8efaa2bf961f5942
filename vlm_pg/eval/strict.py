"""Readings by the reader of training: the answer block of a response, as its reward sees it."""

from __future__ import annotations

from vlm_pg.answers.multiple_choice import named_letters
from vlm_pg.eval.contracts import Reading
from vlm_pg.rewards.parts import read_answer
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import RewardBreakdown, Sample


def strict_reading(sample: Sample, text: str, reward: RewardBreakdown, settings: RewardSettings) -> Reading:
    """What training's reward says of a response.

    Its score is the part "accuracy", so a response without an answer block scores 0. The answer is what the block
    holds, of a choice the letter that it names; None where there is no block or it names several options.
    """
    read = read_answer(text, settings)
    return Reading(_plain(sample, read.text), reward.parts.get("accuracy"), reward.notes.get("accuracy", read.fault))


def _plain(sample: Sample, answer: str) -> str | None:
    """Spelled alike where answers are alike, as far as that can be said without a checker."""
    if sample.answer_kind == "multiple_choice":
        named = named_letters(answer, sample.options) if answer else set()
        return next(iter(named)) if len(named) == 1 else None
    return " ".join(answer.casefold().split()) or None

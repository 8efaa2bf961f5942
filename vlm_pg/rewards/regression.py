"""Regression answers: partial credit by relative error."""

from __future__ import annotations

from vlm_pg.rewards.numbers import read_answer_to
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample


def check_regression(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1 - min(1, |p - g| / |g|) for prediction p and gold g.

    An answer that states no number, or several, is wrong. The relative error to a gold answer of 0 is undefined: such a
    sample has no value whatever was predicted, so that the statistics of a group never mix the two.
    """
    gold, predicted = read_answer_to(sample.answer, answer)
    if gold is None:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one number")
    if gold.value == 0.0:
        return Verdict(None, "gold answer is 0, to which a relative error is undefined")
    if predicted is None:
        return Verdict(0.0, "answer does not state one number")
    return Verdict(1.0 - min(1.0, abs(predicted.value - gold.value) / abs(gold.value)))

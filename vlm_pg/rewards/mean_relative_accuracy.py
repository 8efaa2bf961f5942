"""Mean relative accuracy, VSI-Bench's measure of numbers read from a scene."""

from __future__ import annotations

from fractions import Fraction

from vlm_pg.rewards.numbers import read_answer_to
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

_THRESHOLDS = tuple(Fraction(percent, 100) for percent in range(50, 100, 5))


def check_mean_relative_accuracy(
    answer: str, sample: Sample, settings: RewardSettings, *, ties_pass: bool = False
) -> Verdict:
    """Share of the thresholds t = 0.50, 0.55, ..., 0.95 at which |p - g| / |g| < 1 - t, for prediction p and gold g.

    "Thinking in Space" (VSI-Bench), equation of MRA, with its strict inequality: 3 for a gold 4 earns 0.5, 5 for 10
    earns 0. Graders that write <= (the set's own code among them) give one threshold more where the
    error equals it: ``ties_pass``. Compared as decimal fractions, so
    that such a tie is one. A gold answer of 0, to which a relative error is undefined, has no value.
    """
    gold, predicted = read_answer_to(sample.answer, answer)
    if gold is None:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one number")
    if gold.value == 0.0:
        return Verdict(None, "gold answer is 0, to which a relative error is undefined")
    if predicted is None:
        return Verdict(0.0, "answer does not state one number")
    exact_gold = _as_written(gold.value)
    error = abs(_as_written(predicted.value) - exact_gold) / abs(exact_gold)
    limits = [1 - threshold for threshold in _THRESHOLDS]
    passed = sum(error < limit or (ties_pass and error == limit) for limit in limits)
    return Verdict(passed / len(limits))


def _as_written(value: float) -> Fraction:
    """The decimal that was read: Fraction(1, 10) for 0.1, which in binary is slightly more."""
    return Fraction(repr(value))

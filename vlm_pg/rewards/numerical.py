"""Numerical answers: equal after rounding."""

from __future__ import annotations

import math

from vlm_pg.rewards.numbers import ParsedNumber, parse_number
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample


def check_numerical(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` states the gold number after rounding both to ``numerical_decimal_places``, else 0.0.

    An answer that states no number, or several, is wrong; a gold answer that does is "no value".
    """
    gold = parse_number(sample.answer)
    if gold is None:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one number")
    predicted = parse_number(answer)
    if predicted is None:
        return Verdict(0.0, "answer does not state one number")
    return Verdict(1.0 if _equal(predicted, gold, settings.numerical_decimal_places) else 0.0)


def _equal(predicted: ParsedNumber, gold: ParsedNumber, decimal_places: int) -> bool:
    """Whether two numbers agree; "50 %" agrees with both 50 (the unit was left out) and 0.5 (the same share)."""
    if round(predicted.value, decimal_places) == round(gold.value, decimal_places):
        return True
    if predicted.is_percent == gold.is_percent:
        return False
    percent, plain = (predicted, gold) if predicted.is_percent else (gold, predicted)
    # Exact, since rounding a share to two places would make 0.4 % equal to 0.
    return math.isclose(percent.value / 100.0, plain.value, rel_tol=1e-9)

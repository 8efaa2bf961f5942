"""Numerical answers: equal after rounding, or within a tolerance."""

from __future__ import annotations

from vlm_pg.rewards.numbers import ParsedNumber, parse_number
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample


def check_numerical(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` states the gold number, else 0.0.

    Two numbers are equal if they are after rounding to ``numerical_decimal_places``, or if they differ by at most
    ``numerical_tolerance`` times the gold one. Units, currency and words around a number do not count.
    An answer that states no number, or several, is wrong; a gold answer that does is "no value".
    """
    gold = parse_number(sample.answer)
    if gold is None:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one number")
    predicted = parse_number(answer)
    if predicted is None:
        return Verdict(0.0, "answer does not state one number")
    return Verdict(1.0 if _equal(predicted, gold, settings) else 0.0)


def _equal(predicted: ParsedNumber, gold: ParsedNumber, settings: RewardSettings) -> bool:
    """Whether two numbers agree; "50 %" agrees with both 50 (the unit was left out) and 0.5 (the same share)."""
    decimal_places = settings.numerical_decimal_places
    if round(predicted.value, decimal_places) == round(gold.value, decimal_places):
        return True
    # Rounding errors of a product must not decide at the edge of the tolerance.
    tolerance = max(settings.numerical_tolerance * (1.0 + 1e-9), 1e-9)
    if settings.numerical_tolerance and _close(predicted.value, gold.value, tolerance):
        return True
    if predicted.is_percent == gold.is_percent:
        return False
    # Not rounded, since rounding a share to two places would make 0.4 % equal to 0.
    return _close(_share(predicted), _share(gold), tolerance)


def _share(number: ParsedNumber) -> float:
    return number.value / 100.0 if number.is_percent else number.value


def _close(predicted: float, gold: float, tolerance: float) -> bool:
    return abs(predicted - gold) <= tolerance * abs(gold)

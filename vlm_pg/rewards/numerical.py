"""Numerical answers: equal after rounding, or within a tolerance."""

from __future__ import annotations

from fractions import Fraction

from vlm_pg.rewards.numbers import ParsedNumber, read_answer_to
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

# A gold number of fewer units of the last place than this must be met within this share of it.
_FIRST_INEXACT = 2.0**53
_SMALL_UNITS, _SMALL_TOLERANCE = 5, 0.1


def check_numerical(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` states the gold number, else 0.0.

    Two numbers are equal if they are after rounding to ``numerical_decimal_places``, or if they differ by at most
    ``numerical_tolerance`` times the gold one. Rounding must not erase a small gold number: below five units of the
    last place the two must also be within a tenth of it. Words around a number do not count, and units only where both
    have one: "1.5 m" is "150 cm", and no "1.5 kg". An answer that states no number, or several,
    is wrong; a gold answer that does is "no value".
    """
    gold, predicted = read_answer_to(sample.answer, answer)
    if gold is None:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one number")
    if predicted is None:
        return Verdict(0.0, "answer does not state one number")
    return Verdict(1.0 if _equal(predicted, gold, settings) else 0.0)


def _equal(predicted: ParsedNumber, gold: ParsedNumber, settings: RewardSettings) -> bool:
    """Whether two numbers agree; "50 %" agrees with both 50 (the unit was left out) and 0.5 (the same share)."""
    if min(abs(predicted.value), abs(gold.value)) >= _FIRST_INEXACT and predicted.exact and gold.exact:
        # Two different numbers may be one float.
        limit = abs(gold.exact) * Fraction(settings.numerical_tolerance)
        return abs(predicted.exact - gold.exact) <= limit
    decimal_places = settings.numerical_decimal_places
    if round(predicted.value, decimal_places) == round(gold.value, decimal_places) and _survives_rounding(
        predicted.value, gold.value, decimal_places
    ):
        return True
    # Rounding errors of a product must not decide at the edge of the tolerance.
    tolerance = max(settings.numerical_tolerance * (1.0 + 1e-9), 1e-9)
    if settings.numerical_tolerance and _close(predicted.value, gold.value, tolerance):
        return True
    if predicted.is_percent == gold.is_percent:
        return False
    # Not rounded, since rounding a share to two places would make 0.4 % equal to 0.
    return _close(_share(predicted), _share(gold), tolerance)


def _survives_rounding(predicted: float, gold: float, decimal_places: int) -> bool:
    """Whether rounding leaves enough of the gold number: all small ones would be 0, and equal to it."""
    is_small = 0.0 < abs(gold) < _SMALL_UNITS * 10.0**-decimal_places
    return not is_small or _close(predicted, gold, _SMALL_TOLERANCE)


def _share(number: ParsedNumber) -> float:
    return number.value / 100.0 if number.is_percent else number.value


def _close(predicted: float, gold: float, tolerance: float) -> bool:
    return abs(predicted - gold) <= tolerance * abs(gold)

"""What a number that was read is worth, by the rule of its question's kind."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from vlm_pg.answers.numbers import (
    ParsedNumber,
    check_mean_relative_accuracy,
    check_numerical,
    check_regression,
    in_unit_of,
    read_quantity,
)
from vlm_pg.answers.verdict import Verdict, shorten
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.asked import Asked
from vlm_pg.eval.reading.quantities import Quantity
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

_MOST_PLACES = 12


def grade_number(
    quantity: Quantity | None, asked: Asked, sample: Sample, settings: RewardSettings, *, ties_pass: bool = False
) -> Reading:
    """A reading with its score: by ``rewards/mean_relative_accuracy``, ``regression`` or ``numerical``.

    Of a numerical question whose set publishes a precision (MathVista's ``precision``), gold and answer are rounded to
    it, and nothing else makes them equal: "14.9" is not 14 with precision 0. A number in a unit that measures something
    else than the one asked for scores 0.
    """
    gold = read_quantity(sample.answer)[0]
    if gold is None:
        return Reading(None, None, f"gold answer {shorten(sample.answer)} does not state one number")
    answer = None if quantity is None else written(quantity, asked)
    number = None if quantity is None else in_unit_of(quantity.number, quantity.unit, asked.unit)
    unread = _verdict("", gold, asked, sample, settings, ties_pass)
    if quantity is None or answer is None:
        return Reading(None, unread.value, unread.note)
    if number is None:
        note = f"{shorten(answer)} is in a unit that measures something else than what was asked for"
        return Reading(answer, unread.value, note)
    verdict = _verdict(answer, gold, asked, sample, settings, ties_pass)
    return Reading(answer, verdict.value, verdict.note)


def written(quantity: Quantity, asked: Asked) -> str:
    """A number as digits, in the unit asked for: "1400", "0.375", "8/17", "40%"; with its own unit if that is another.

    A percent sign is left out where a percentage was asked for.
    """
    number = in_unit_of(quantity.number, quantity.unit, asked.unit)
    if number is None:
        return f"{_digits(quantity.number)} {quantity.unit.name if quantity.unit else ''}".strip()
    return _digits(number) + ("%" if number.is_percent and not asked.is_percent else "")


def _digits(number: ParsedNumber) -> str:
    exact = number.exact if number.exact is not None else Fraction(repr(number.value))
    if exact.denominator == 1:
        return str(exact.numerator)
    left = exact.denominator
    for factor in (2, 5):
        while left % factor == 0:
            left //= factor
    if left != 1:
        return f"{exact.numerator}/{exact.denominator}"
    places = next((n for n in range(1, 40) if (exact * 10**n).denominator == 1), 40)
    text = f"{abs(exact.numerator) * 10**places // exact.denominator:0{places + 1}d}"
    return f"{'-' if exact < 0 else ''}{text[:-places]}.{text[-places:]}"


def _verdict(
    answer: str, gold: ParsedNumber, asked: Asked, sample: Sample, settings: RewardSettings, ties_pass: bool
) -> Verdict:
    plain = replace(sample, answer=_digits(gold) + ("%" if gold.is_percent and not asked.is_percent else ""))
    if sample.answer_kind == "mean_relative_accuracy":
        return check_mean_relative_accuracy(answer, plain, settings, ties_pass=ties_pass)
    if sample.answer_kind == "regression":
        return check_regression(answer, plain, settings)
    places = sample.details.get("precision")
    if places is None:
        return check_numerical(answer, plain, settings)
    number = read_quantity(answer)[0]
    rounded = None if number is None else round(number.value, min(int(places), _MOST_PLACES))
    return Verdict(float(rounded == round(gold.value, min(int(places), _MOST_PLACES))))

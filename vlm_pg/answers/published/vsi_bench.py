"""VSI-Bench: choices, and numbers by mean relative accuracy. The kind of answer tells them apart."""

from __future__ import annotations

import math

from vlm_pg.answers.published.first_number import first_number
from vlm_pg.answers.published.relative_accuracy import relative_accuracy_below, relative_accuracy_or_equal
from vlm_pg.answers.published.rule import Rule, chosen, letters_of, short, unusable
from vlm_pg.answers.published.spatial_kit import kit_letter, kit_number
from vlm_pg.answers.published.tags import plain_number, tagged, video_r1
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The text before the first blank, without points at its end: a letter in any case, or a number."""
    word = output.split(" ", 1)[0].rstrip(".").strip()
    if sample.answer_kind == "multiple_choice":
        return chosen(sample, word.upper() if word.upper() in letters_of(sample) else "")
    gold = _gold(sample)
    if gold is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number other than 0")
    number = _python_number(word)
    if number is None:
        return Reading(None, 0.0, "the first word is no number")
    return Reading(short(word), relative_accuracy_or_equal(number, gold))


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    """Choices as the authors read them, numbers wherever they stand."""
    if sample.answer_kind == "multiple_choice":
        return _official(sample, output, cut_off)
    return _graded(sample, first_number(output))


def _kit(sample: Sample, output: str, cut_off: bool) -> Reading:
    if sample.answer_kind == "multiple_choice":
        return chosen(sample, kit_letter(output))
    return _graded(sample, kit_number(output))


def _graded(sample: Sample, number: float | None) -> Reading:
    gold = _gold(sample)
    if gold is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number other than 0")
    if number is None:
        return Reading(None, 0.0, "there is no number")
    return Reading(f"{number:.15g}", relative_accuracy_or_equal(number, gold))


def _video_r1(sample: Sample, output: str, cut_off: bool) -> Reading:
    if sample.answer_kind == "multiple_choice":
        return video_r1(sample, output, cut_off)
    gold = _gold(sample)
    if gold is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number other than 0")
    text = tagged(output) or output
    number = plain_number(text)
    if number is None:
        return Reading(None, 0.0, "the whole answer is no number")
    return Reading(short(text), relative_accuracy_below(number, gold))


def _gold(sample: Sample) -> float | None:
    gold = plain_number(sample.answer)
    return gold if gold is not None and math.isfinite(gold) and gold != 0.0 else None


def _python_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


RULES = (
    Rule(
        "vsi_bench/official",
        _official,
        "the authors' rule",
        "vision-x-nyu/thinking-in-space, lmms_eval/tasks/vsibench/utils.py",
        "Only the text before the first blank is read: '(B)', 'B)' and 'about 3' are wrong. Thresholds are met with "
        "<=, where the paper has <: 3 for 4 is 0.6, 5 for 10 is 0.1.",
    ),
    Rule(
        "vsi_bench/lmms",
        _lmms,
        "lmms-eval's rule since 0.7; before, it was the authors'",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/vsibench/utils.py",
        "Choices as by the authors' rule. Of numbers the first in figures or English words counts, wherever it stands: "
        "'from 2 to 3' is 2, 'one, two' is 3, '1,200' is 1. Thresholds are met with <=.",
    ),
    Rule(
        "vsi_bench/kit",
        _kit,
        "VLMEvalKit's rule without its judge",
        "open-compass/VLMEvalKit, vlmeval/dataset/utils/spatial_bench",
        "Choices by six steps, of which the first takes the letter that any word in answer tags begins with ('<answer>"
        "front</answer>' is F). Numbers: the first in answer tags, else the last ('3 or 4' is 4). Thresholds are met "
        "with <=. A gold answer of 0, which the kit compares by the difference, has no value here.",
    ),
    Rule(
        "vsi_bench/video_r1",
        _video_r1,
        "Video-R1's rule",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output. Thresholds are met with <, in single precision: 3 for 4 "
        "is 0.5. Its published figure is the mean of two means, of choices and of numbers.",
    ),
)

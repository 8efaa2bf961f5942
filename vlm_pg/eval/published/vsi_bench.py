"""VSI-Bench: choices, and numbers by mean relative accuracy. The kind of answer tells them apart."""

from __future__ import annotations

import math

from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.published.relative_accuracy import relative_accuracy_below, relative_accuracy_or_equal
from vlm_pg.eval.published.rule import Rule, chosen, letters_of, short, unusable
from vlm_pg.eval.published.tags import plain_number, tagged, video_r1
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
        "<=, where the paper has <: 3 for 4 is 0.6, 5 for 10 is 0.1. lmms-eval read alike; its later search for "
        "numbers, and VLMEvalKit's rule, are not offered.",
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

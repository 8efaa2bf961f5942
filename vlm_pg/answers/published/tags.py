"""What stands in answer tags, as Video-R1 reads it, and its rule for choices and numbers (``src/eval_bench.py``)."""

from __future__ import annotations

from vlm_pg.answers.published.rule import chosen, letters_of, short, unusable
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_OPENING, _CLOSING = "<answer>", "</answer>"


def tagged(output: str) -> str | None:
    """What stands between the first "<answer>" and the next "</answer>", without blanks around; None without both."""
    start = output.find(_OPENING)
    end = -1 if start == -1 else output.find(_CLOSING, start + len(_OPENING))
    return None if end == -1 else output[start + len(_OPENING) : end].strip()


def plain_number(text: str) -> float | None:
    """The number that the whole text is, commas removed; None if it is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def video_r1(sample: Sample, output: str, cut_off: bool) -> Reading:
    """Choices: the tagged text, or the whole output without one, equals the letter. Numbers: equal after rounding to 2
    places, and both written with a "." or "," or both without. Every answer in words is wrong, and counts.
    """
    text = (tagged(output) or output).strip()
    if sample.answer_kind == "multiple_choice":
        return chosen(sample, text if text in letters_of(sample) else "")
    gold, number = plain_number(sample.answer), plain_number(text)
    if sample.answer_kind not in ("numerical", "mathematics") or (gold is None and sample.answer_kind != "numerical"):
        return Reading(short(text), 0.0, "the rule scores every answer in words 0")
    if gold is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number")
    if number is None:
        return Reading(None, 0.0, "the whole answer is no number")
    alike = _has_mark(sample.answer) == _has_mark(text)
    note = "" if alike else "only one of answer and gold answer is written with a point or comma, which the rule counts"
    return Reading(short(text), float(alike and round(gold, 2) == round(number, 2)), note)


def _has_mark(text: str) -> bool:
    return "." in text or "," in text

"""CPPO's reading of GSM8K (``evaluate`` of ``src/open_r1/grpo_trainer_gsm.py`` and the functions it calls)."""

from __future__ import annotations

import re

from vlm_pg.answers.published.rule import short, unusable
from vlm_pg.answers.published.tags import plain_number
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_SIGNED = re.compile(r"-?\d*\.?\d+")
_UNSIGNED = re.compile(r"\d+\.?\d*")
_DROPPED = str.maketrans("", "", "$%,")


def cppo_gsm8k(sample: Sample, output: str, cut_off: bool) -> Reading:
    """Right where the last answer tags, or without them the whole output, are the gold text, hold it as their only
    number, or hold it as their last number; of the last one the sign is lost.
    """
    gold = sample.answer.strip().replace(",", "")
    wanted = plain_number(gold)
    if wanted is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number")
    tagged = _last_tagged(output)
    text = output if tagged is None else tagged
    if text == gold:
        return Reading(short(text), 1.0)
    numbers = _SIGNED.findall(text)
    if len(numbers) == 1 and float(numbers[0]) == wanted:
        return Reading(short(numbers[0]), 1.0)
    last = _last(text)
    if last is None:
        return Reading(None, 0.0, "there is no number")
    wanted_last = _last(gold)
    return Reading(short(last), float(wanted_last is not None and float(last) == float(wanted_last)))


def _last(text: str) -> str | None:
    numbers = _UNSIGNED.findall(text.translate(_DROPPED))
    return numbers[-1] if numbers else None


def _last_tagged(output: str) -> str | None:
    """What the last opening tag and the next closing one hold, without commas; None without both, or for "..."."""
    _, opening, rest = output.rpartition("<answer>")
    if not opening or "</answer>" not in rest:
        return None
    answer = rest.partition("</answer>")[0].strip().replace(",", "")
    return None if answer == "..." else answer

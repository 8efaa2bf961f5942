"""Charades-STA: spans of time, scored by intersection over union. The gold answer is "[start, end]", in seconds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from vlm_pg.answers.published.rule import Rule, unusable
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

Span = tuple[float, float]

_EXAMPLE = "a specific example is : 20.8 - 30.0 seconds"
# The published patterns, made so that a long run of digits is read once: a number starts where its digits do, and
# reaches as far as it can, since only a blank or a dash may follow.
_NUMBER = r"(?<!\d)(\d++(?:\.\d++)?+)"
_DASHED = re.compile(rf"{_NUMBER}\s*+[–-]\s*+{_NUMBER}")
_DASHED_UNITS = re.compile(rf"{_NUMBER}\s*+s?+\s*+[–-]\s*+{_NUMBER}")
_CLOCK_TIME = r"\b(\d{1,2}:\d{2}(?::\d{2})?)"
_CLOCK = re.compile(rf"{_CLOCK_TIME}\b")
_DASHED_CLOCK = re.compile(rf"{_CLOCK_TIME}\s*+[–-]\s*+{_CLOCK_TIME[2:]}\b")
_WORDED = re.compile(r"(?<!\d)(\d++\.?+\d*+) (?:to|and) (\d++\.?+\d*+)")
_SENTENCE_END = re.compile(r"[!?\n]")
_TIME = re.compile(r"\b(?:\d+\.\d+\b|\d+)\b")
# The published list has "starts", "end time" and others beside, which contain one of these.
_KEYWORDS = ("start", "end", "happen")


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    sentences = _SENTENCE_END.split(output.lower().replace(_EXAMPLE, "").replace("to", "-"))
    sentences = [one for one in sentences if any(word in one for word in _KEYWORDS)] or sentences
    clocks = [time for one in sentences for time in _CLOCK.findall(one)]
    firsts = [time[0] for time in map(_TIME.search, sentences) if time]
    for times in (
        _first_pair(_DASHED_CLOCK, sentences),
        _first_pair(_DASHED, sentences),
        clocks[:2],
        firsts[:2],
        _first_pair(_DASHED_UNITS, sentences),
    ):
        if len(times) == 2:
            start, end = sorted(map(_seconds, times))
            return _scored(sample, (start, end))
    return _scored(sample, None)


def _first_pair(pattern: re.Pattern[str], sentences: Sequence[str]) -> Sequence[str]:
    """The two times of the first sentence that has them so; none if no one has."""
    return next((found.groups() for found in map(pattern.search, sentences) if found), ())


def _seconds(time: str) -> float:
    """Of "18.5", "0:18" and "0:00:18"."""
    return sum(float(part) * 60**power for power, part in enumerate(reversed(time.split(":"))))


def _time_r1(sample: Sample, output: str, cut_off: bool) -> Reading:
    spans = _WORDED.findall(output)
    return _scored(sample, (float(spans[-1][0]), float(spans[-1][1])) if spans else None)


def _scored(sample: Sample, span: Span | None) -> Reading:
    """Length shared with the gold span over the length from the first start to the last end; 0 where none is shared."""
    gold = _gold(sample)
    if gold is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no span such as [2.5, 9.1]")
    if span is None:
        return Reading(None, 0.0, "the rule reads no span")
    shared = min(gold[1], span[1]) - max(gold[0], span[0])
    whole = max(gold[1], span[1]) - min(gold[0], span[0])
    return Reading(f"[{span[0]:g}, {span[1]:g}]", max(shared, 0.0) / whole if math.isfinite(whole) else 0.0)


def _gold(sample: Sample) -> Span | None:
    try:
        values = json.loads(sample.answer)
    except ValueError:
        return None
    if not isinstance(values, list) or len(values) != 2 or not all(type(one) in (int, float) for one in values):
        return None
    start, end = map(float, values)
    return (start, end) if math.isfinite(start) and math.isfinite(end) and start < end else None


RULES = (
    Rule(
        "charades_sta/lmms",
        _lmms,
        "lmms-eval's rule, after VTimeLLM's",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/charades_sta/utils.py",
        "Only lines with 'start', 'end' or 'happen' are read, all where none has one. Every 'to' becomes '-', even "
        "within words; then the first 'a - b' counts. '[a, b]' and 'starts at 2 and ends at 8' on one line are not "
        "read, minutes and seconds (0:18) are. Reversed spans are turned round.",
    ),
    Rule(
        "charades_sta/time_r1",
        _time_r1,
        "Time-R1's rule",
        "www-Ye/Time-R1, evaluate.py",
        "The last 'a to b' or 'a and b', wherever it stands, '2 and 3 people' included. Reversed spans are not turned "
        "round and score 0.",
    ),
)

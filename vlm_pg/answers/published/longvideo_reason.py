"""LongVideo-Reason. The gold answer is a letter, or a text."""

from __future__ import annotations

from vlm_pg.answers.published.checking import whole_outputs_agree
from vlm_pg.answers.published.rule import Rule, short
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_OPENING, _CLOSING = "<answer>", "</answer>"
_LEAD_IN = "Therefore the final answer is:"


def _long_rl(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The text of the first answer tags on one line, or the whole output, equals the gold answer.

    Math-verify, which that code asks first, reads no mathematics in a letter and so decides nothing there.
    """
    answer = _answer(output)
    right, note = answer == sample.answer.strip(), ""
    if not right and not (len(sample.answer.strip()) == 1 and sample.answer.strip().isalpha()):
        right, note = whole_outputs_agree(sample.answer, output)
    return Reading(short(answer), float(right), note)


def _answer(output: str) -> str:
    opening = f"{_OPENING}{_LEAD_IN} " if _LEAD_IN in output else _OPENING
    for line in output.split("\n"):
        _, found, rest = line.partition(opening)
        if found and _CLOSING in rest:
            return rest.partition(_CLOSING)[0].strip()
    return output.strip()


RULES = (
    Rule(
        "longvideo_reason/long_rl",
        _long_rl,
        "the rule of Long-RL, the set's authors",
        "NVlabs/Long-RL, longvideo-reason/eval.py, accuracy_reward",
        "The first answer tags on one line, or the whole output, must equal the gold answer: '(B)' and 'B.' are wrong. "
        "Other golds than letters are also compared by math-verify on the whole output.",
    ),
)

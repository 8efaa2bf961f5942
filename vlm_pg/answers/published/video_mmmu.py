"""Video-MMMU. ``details``: ``question_type`` ("multiple-choice", else open); without it the kind of answer decides."""

from __future__ import annotations

from vlm_pg.answers.published.mmmu import (
    last_option_text,
    last_placed,
    letters_in,
    open_answers,
    open_is_right,
    options_in,
    trimmed,
)
from vlm_pg.answers.published.ranked import ranked
from vlm_pg.answers.published.rule import Rule, chosen, short, texts_of
from vlm_pg.answers.published.tags import video_r1
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_LEFT_OUT = Reading(None, 0.0, "the rule takes an empty output for a failed request and leaves it out", counts=False)
_NO_ANSWER = ("", "API Error")


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    if output in _NO_ANSWER:
        return _LEFT_OUT
    return chosen(sample, _letter(sample, output)) if _is_choice(sample) else _open(sample, output)


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    if _is_choice(sample):
        return ranked(sample, output, cut_off)
    return _LEFT_OUT if output in _NO_ANSWER else _open(sample, output)


def _is_choice(sample: Sample) -> bool:
    named = sample.details.get("question_type")
    return sample.answer_kind == "multiple_choice" if named is None else named == "multiple-choice"


def _letter(sample: Sample, output: str) -> str:
    """ "A." and "A:", else "(A)", else "A ", else an option's text; of several the last of the first form found."""
    texts, text = texts_of(sample), trimmed(output)
    letters = list(texts)
    for forms, placed in ((("{}.", "{}:"), ""), (("({})",), "({})"), (("{} ",), " {} ")):
        found = letters_in(text, forms, letters)
        if found:
            # Letters with a colon are placed by a point where any letter has one.
            form = placed or ("{}." if letters_in(text, ("{}.",), letters) else "{}:")
            return last_placed(found, text, form)
    found = options_in(text, texts)
    return last_option_text(text, found, texts) if found else ""


def _open(sample: Sample, output: str) -> Reading:
    return Reading(short(output), float(open_is_right(sample.answer, open_answers(output))))


_SOURCE = "lmms_eval/tasks/videommmu/utils.py"

RULES = (
    Rule(
        "video_mmmu/official",
        _official,
        "the authors' rule",
        f"EvolvingLMMs-Lab/videommmu, {_SOURCE}; lmms-eval's _task_utils/mmmu_mcq_utils.py has kept its parser",
        "'A.' goes before '(A)'. An open answer is right if it contains the gold text or states its number after "
        "rounding to 2 places, so '0.286 or 0.3' is right. Empty outputs leave the denominator.",
    ),
    Rule(
        "video_mmmu/lmms",
        _lmms,
        "lmms-eval's rule",
        f"EvolvingLMMs-Lab/lmms-eval, {_SOURCE} and _task_utils/mcq_extract.py",
        "Letters are ranked by form, so that with 10 options 'I choose option B.' is I. Empty outputs are wrong "
        "answers to choices, and leave the denominator of open questions.",
    ),
    Rule(
        "video_mmmu/video_r1",
        video_r1,
        "Video-R1's rule",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output: '(B)' and 'B.' are wrong, "
        "and so is every answer in words.",
    ),
)

"""MathVista. ``details``: ``question_type`` ("multi_choice" or "free_form"), ``answer_type`` ("text", "integer",
"float", "list"), ``precision``, and ``choices`` where they are not the options' texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vlm_pg.answers.published.rule import Rule, letters_of, short, texts_of, unusable
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_BRACKETED = re.compile(r"\(([a-zA-Z])\)")


def _reader(floats_fail: bool) -> Callable[[Sample, str, bool], Reading]:
    def read(sample: Sample, output: str, cut_off: bool) -> Reading:
        named = sample.details.get("question_type")
        if sample.answer_kind == "multiple_choice" if named is None else named == "multi_choice":
            return _choice(sample, output)
        kind = sample.details.get("answer_type")
        if kind == "float" and floats_fail:
            return Reading(short(output), 0.0, "the published code fails to round and counts every float wrong")
        if kind == "integer":
            return _number(sample, _whole(output))
        if kind == "float":
            precision = sample.details.get("precision")
            if precision is None:
                return unusable("details lack the precision that answers are rounded to")
            return _number(sample, _rounded(output, int(precision)))
        if kind == "list":
            return Reading(None, 0.0, "lists are extracted by the judge alone, which is left out")
        return unusable(f"details['answer_type'] is {str(kind)[:80]!r}; integer, float or list is expected")

    return read


def _choice(sample: Sample, output: str) -> Reading:
    """A choice's text is read as it stands; all else is the judge's, and without it the text is "". A letter in
    brackets in the text stands for that choice; any other text for the nearest choice, so that "" is the shortest.
    """
    texts = list(sample.details.get("choices") or texts_of(sample).values())
    letters = letters_of(sample)
    if not texts or len(texts) != len(letters) or sample.answer not in letters:
        return unusable("the choices are not as many as the options, or the gold answer is none of their letters")
    extracted = output.strip() if output in texts else ""
    bracketed = _BRACKETED.search(extracted)
    if bracketed:
        extracted = bracketed[1].upper()
    distances = [edit_distance(extracted, choice) for choice in texts]
    index = letters.index(extracted) if extracted in letters else distances.index(min(distances))
    note = "" if output in texts else "not the text of a choice, so the shortest is taken; the judge is left out"
    return Reading(letters[index], float(texts[index] == texts[letters.index(sample.answer)]), note)


def edit_distance(left: str, right: str) -> int:
    """Fewest insertions, deletions and replacements of one character that make one text the other (Levenshtein)."""
    row = list(range(len(right) + 1))
    for count, sign in enumerate(left, 1):
        above, row = row, [count]
        for index, other in enumerate(right):
            row.append(min(above[index] + (sign != other), above[index + 1] + 1, row[index] + 1))
    return row[-1]


def _whole(output: str) -> str | None:
    try:
        return str(int(float(str(int(output)))))
    except (ValueError, OverflowError):
        return None


def _rounded(output: str, precision: int) -> str | None:
    try:
        return str(round(float(output), precision))
    except (ValueError, OverflowError):
        return None


def _number(sample: Sample, extracted: str | None) -> Reading:
    if extracted is None:
        return Reading(None, 0.0, "the whole output is no such number; the judge is left out")
    return Reading(extracted, float(extracted == sample.answer))


_SHARED = (
    "Without the judge (GPT) that extracts answers only whole outputs that are a choice's text or a number are read, "
    "and any other output to a choice is the SHORTEST choice, as where the judge fails. A bare letter is such an "
    "output."
)

RULES = (
    Rule(
        "mathvista/official",
        _reader(floats_fail=False),
        "the authors' rule without its judge",
        "lupantech/MathVista, evaluation/extract_answer.py and calculate_score.py",
        f"{_SHARED} Numbers are compared as text, after rounding to the precision.",
    ),
    Rule(
        "mathvista/lmms",
        _reader(floats_fail=True),
        "lmms-eval's rule without its judge",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mathvista/mathvista_evals.py",
        f"{_SHARED} Rounding fails on the precision as the set has it (1.0), so that every float is wrong.",
    ),
)

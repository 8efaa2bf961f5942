"""MMVU. ``details``: ``question_type`` ("multiple-choice" or "open-ended"); without it the kind of answer decides."""

from __future__ import annotations

import re
import string

from vlm_pg.answers.published.rule import Rule, accepted, short, texts_of, video_r1
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_LETTER = re.compile(r"\b([A-E])\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d+\.?\d*")
_COST = re.compile(r"O\s*+\(", re.IGNORECASE)
_RAISED = str.maketrans({sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_TOLERANCE = 0.01


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    named = sample.details.get("question_type")
    if named == "multiple-choice" or (named is None and sample.answer_kind == "multiple_choice"):
        texts = texts_of(sample)
        return accepted(sample, [letter for letter in texts if _is_choice(letter, texts[letter], output.strip())])
    right = _is_open(sample.answer, output)
    return Reading(short(output), float(right), "" if right else "no rule applies; the judge is left out")


def _is_choice(letter: str, text: str, output: str) -> bool:
    """Whether the rule takes ``output`` for an option: the letter stands alone in it, in any case, or its text stands
    in it, or the letter is part of it and so is a word of the text.
    """
    found = _LETTER.search(output)
    if (found and found[1].upper() == letter) or re.search(rf"\b{letter}\b", output, re.IGNORECASE):
        return True
    lowered, text = output.lower(), text.strip().lower()
    if text in lowered:
        return True
    words = [word.strip(string.punctuation) for word in text.split()]
    return letter in output.upper() and any(word in lowered for word in words if len(word) > 2)


def _is_open(gold: str, output: str) -> bool:
    """Whether any of six comparisons with the gold answer holds: equal; one part of the other; first numbers within
    0.01; the gold answer's words of more than 2 letters all in the output, where it has 2 to 5; equal costs "O(...)".
    """
    gold_text, text = (" ".join(_caret(one).split()) for one in (gold, output))
    if gold_text in text or text in gold_text:
        return True
    numbers = [_NUMBER.search(one) for one in (gold_text, text)]
    if numbers[0] and numbers[1] and abs(float(numbers[0][0]) - float(numbers[1][0])) < _TOLERANCE:
        return True
    gold_words, words = ([word.strip(string.punctuation) for word in one.split()] for one in (gold_text, text))
    gold_words = [word for word in gold_words if word]
    if 2 <= len(gold_words) <= 5 and set(words) >= {word for word in gold_words if len(word) > 2}:
        return True
    cost = _cost(gold_text)
    return cost != "" and cost == _cost(text)


def _caret(text: str) -> str:
    return text.strip().lower().translate(_RAISED)


def _cost(text: str) -> str:
    """The first "O(...)" with something in its brackets; "" without one."""
    for opening in _COST.finditer(text):
        end = text.find(")", opening.end())
        if end == -1:
            return ""
        if end > opening.end():
            return text[opening.start() : end + 1]
    return ""


RULES = (
    Rule(
        "mmvu/lmms",
        _lmms,
        "lmms-eval's rule without its judge, which it asks about open questions that the rule calls wrong",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mmvu/utils.py, evaluate_with_rule_based",
        "Unsound: any lone gold letter in any case makes a choice right; of open answers '' is right, 'mV' for 'µV' "
        "and '48 g/mol' for '84 g/mol' too. The authors' own scoring, by gpt-4o alone, is not offered.",
    ),
    Rule(
        "mmvu/video_r1",
        video_r1,
        "Video-R1's rule, for multiple choice alone, which it reports as MMVU (mc)",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output: '(B)' and 'B.' are wrong.",
    ),
)

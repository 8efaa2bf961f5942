"""Multiple select: several options may be right, and an answer is right when it names all of these and no other."""

from __future__ import annotations

import re
import string

from vlm_pg.rewards.lead_ins import boxed_statement, without_lead_in
from vlm_pg.rewards.options import Choices, choices_of, same_text
from vlm_pg.rewards.plain_text import DECORATION, plain_short, without_marks
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import NONE_RIGHT, Sample, right_letters

_LETTER = r"[(\[]?([A-Za-z])[)\]]?[.:]?"
_BETWEEN = re.compile(r"\s*(?:[,;、，]\s*(?:and\s)?|\sand\s|\s?(?:[&+和与]|以?及)\s?|\s)\s*", re.IGNORECASE)
_LINE = re.compile(r"\s*[;\n]\s*")
_ONE = re.compile(_LETTER)
_WITH_TEXT = re.compile(r"(?:[-*]\s)?[(\[]?([A-Za-z])(?:[)\]][.:]?|[.:])\s{0,3}(\S.*)")
_NONE = re.compile(r"none(?: of (?:the|these|those) (?:options|choices|above)| of them| is right| are right)?")


def check_multiple_select(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` names all right options and no other, else 0.0.

    Understood: letters ("A, C", "(A) and (C)", "A C", in their order "AC"), options with their letters, a line each or
    with semicolons between ("A. red; C. blue"), and "none". Anything else is wrong: of "A or C", or "not C", nobody
    knows what is selected.
    """
    choices = choices_of(sample)
    letters = {letter for letter, _ in choices} or set(string.ascii_uppercase)
    gold = right_letters(sample.answer)
    if not gold <= letters:
        return Verdict(None, f"gold answer {shorten(sample.answer)} is no list of its {len(letters)} options' letters")
    selected = _selected(answer, choices)
    if selected is None and (boxed := boxed_statement(answer)):
        selected = _selected(boxed, choices)
    if selected is None:
        return Verdict(0.0, f"answer is no list of options, nor '{NONE_RIGHT}'")
    if not selected <= letters:
        return Verdict(0.0, f"answer names options that are none: {', '.join(sorted(selected - letters))}")
    return Verdict(1.0 if selected == gold else 0.0)


def _selected(answer: str, choices: Choices) -> set[str] | None:
    """The letters that an answer lists; None where it is no list."""
    sentence = without_marks(plain_short(answer)).strip()
    text = without_marks(without_lead_in(sentence)).rstrip(DECORATION + ".。").strip("\\{} ") or sentence
    if _NONE.fullmatch(text.lower()) and not any(same_text(text, option) for _, option in choices):
        return set()
    listed = [_ONE.fullmatch(part) for part in _BETWEEN.split(text)]
    if all(listed):
        return {match[1].upper() for match in listed if match}
    if text.isalpha() and text.isupper() and list(text) == sorted(set(text)):
        return set(text)
    options = dict(choices)
    with_texts = [_WITH_TEXT.fullmatch(part) for part in _LINE.split(text)]
    if all(match and same_text(match[2], options.get(match[1].upper(), "")) for match in with_texts):
        return {match[1].upper() for match in with_texts if match}
    return None

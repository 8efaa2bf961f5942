"""The options of a multiple choice question: their letters and texts."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import lru_cache

from vlm_pg.rewards.latex_spelling import one_spelling
from vlm_pg.rewards.letter_case import same_but_for_case
from vlm_pg.rewards.plain_text import plain, plain_formula, without_marks
from vlm_pg.types import Sample

Choices = tuple[tuple[str, str], ...]

_LABELLED = re.compile(r"\s*\(?([A-Za-z])[.):]\s*(.*)", re.DOTALL)
_LINE = re.compile(r"^\s{0,8}\(?([A-Z])[.):、]\s{0,8}(\S.*)$", re.MULTILINE)
_CLOSING = ".。!?;,"
_BRACKETED = re.compile(r"\s*\(([^()]*)\)\s*")


def split_options(options: Sequence[str]) -> list[tuple[str, str]]:
    """Letter and text of each option: "B. red" -> ("B", "red"). Options without labels are lettered in order."""
    labelled = [_LABELLED.match(option) for option in options]
    if options and all(labelled):
        return [(match[1].upper(), match[2].strip()) for match in labelled if match]
    return list(zip(string.ascii_uppercase, (option.strip() for option in options), strict=False))


def choices_of(sample: Sample) -> Choices:
    """The sample's options; if it has none, those that stand in its question, a line each, or the gold answer's own."""
    return _choices(sample.options, sample.question, sample.answer)


@lru_cache(maxsize=1024)
def _choices(options: tuple[str, ...], question: str, answer: str) -> Choices:
    """Remembered, since all responses to a question are read with its options."""
    if options:
        return plain_choices(options)
    lines = _LINE.findall(plain(question))
    if [letter for letter, _ in lines] == list(string.ascii_uppercase[: len(lines)]) and len(lines) > 1:
        return tuple((letter, without_marks(text)) for letter, text in lines)
    own = _LABELLED.fullmatch(plain(answer).strip())
    return ((own[1].upper(), without_marks(own[2])),) if own and own[2] else ()


def plain_choices(options: Sequence[str]) -> Choices:
    """``split_options`` with texts as they are compared."""
    return tuple((letter, without_marks(plain_formula(option))) for letter, option in split_options(options))


def same_text(left: str, right: str) -> bool:
    """Whether two texts are the same but for case (not of symbols), spacing, quotes around them, closing punctuation
    and, of formulas, their spelling."""
    left, right = bare_text(left), bare_text(right)
    return same_but_for_case(left, right) or same_but_for_case(one_spelling(left), one_spelling(right))


def letters_of_text(text: str, choices: Choices) -> set[str]:
    """The letters of the options that a text is the text of: those that are closest to it, where several are.

    letters_of_text("CO", (("A", "Co"), ("B", "CO"))) -> {"B"}
    """
    for same in (_identical, same_text, _same_but_for_currency):
        if letters := {letter for letter, option in choices if option and same(text, option)}:
            return letters
    return set()


def folded(text: str) -> str:
    """``bare_text`` in small letters."""
    return bare_text(text).casefold()


def bare_text(text: str) -> str:
    """What is compared of an option's text: bare_text("(Group  A).") -> "Group A"."""
    text = without_marks(without_marks(text).rstrip(_CLOSING))
    if bracketed := _BRACKETED.fullmatch(text):
        text = without_marks(bracketed[1])
    return " ".join(text.split()).rstrip(_CLOSING).strip()


def _identical(left: str, right: str) -> bool:
    """Whether two texts are the same, case, currency and the sign of a factorial considered."""
    return bare_text(left) == bare_text(right) and left.endswith("!") == right.endswith("!")


def _same_but_for_currency(left: str, right: str) -> bool:
    """Whether one text is a number of dollars, and the other the number alone."""
    without = [bare_text(text).removeprefix("$").strip() for text in (left, right)]
    return without[0] == without[1]

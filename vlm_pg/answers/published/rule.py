"""A published rule, and what the rules share: options as the published code sees them, and how a verdict is told."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_pg.answers.options import split_options
from vlm_pg.answers.verdict import Reader, Reading
from vlm_pg.types import Sample

MAX_TEXT = 200  # longer texts are no answers that people could compare


@dataclass(frozen=True)
class Rule:
    """A reader that does what published code does.

    ``name``: "set/whose". ``source``: repository and file. ``odd``: what is odd about it, and which part of it is not
    offered.
    """

    name: str
    read: Reader
    whose: str
    source: str
    odd: str

    @property
    def line(self) -> str:
        """All that on one line."""
        return f"{self.name}: {self.whose} ({self.source}). {self.odd}"


def letters_of(sample: Sample) -> list[str]:
    """The letters of a question's options, in order."""
    return [letter for letter, _ in split_options(sample.options)]


def texts_of(sample: Sample) -> dict[str, str]:
    """The texts of a question's options by letter, as published: without the letters that records put before them."""
    return dict(split_options(sample.options))


def chosen(sample: Sample, letter: str, note: str = "") -> Reading:
    """The reading of an output that chooses one option ("" if the rule finds none, which it counts as wrong)."""
    if sample.answer not in letters_of(sample):
        return unusable(_no_letter(sample))
    return Reading(letter or None, float(bool(letter) and letter == sample.answer), note or _unread(letter))


def accepted(sample: Sample, letters: Sequence[str]) -> Reading:
    """The reading by a rule that only says which gold answers it would have taken the output for."""
    if sample.answer not in letters_of(sample):
        return unusable(_no_letter(sample))
    note = "" if len(letters) == 1 else f"the rule takes it for {', '.join(letters)}" if letters else _unread("")
    return Reading(letters[0] if len(letters) == 1 else None, float(sample.answer in letters), note)


def unusable(why: str) -> Reading:
    """The reading where the question itself has no value."""
    return Reading(None, None, why)


def drawn(rule: str, sample: Sample, output: str) -> Reading:
    """The reading where published code chooses an option by a global random state: here the same whenever the rule, the
    question and the output are the same, and each option as often as the others.
    """
    letters = letters_of(sample)
    if not letters:
        return unusable(_no_letter(sample))
    key = "\0".join((rule, sample.sample_id, output)).encode("utf-8", "surrogatepass")
    place = int.from_bytes(hashlib.sha256(key).digest()[:8]) % len(letters)
    return chosen(sample, letters[place], "drawn: nothing was read")


def short(text: str) -> str | None:
    """``text`` as an answer for people, None where it is none or too long for one."""
    text = " ".join(text.split())
    return text if 0 < len(text) <= MAX_TEXT else None


def _no_letter(sample: Sample) -> str:
    return f"gold answer {sample.answer[:80]!r} is none of the letters of the {len(sample.options)} options"


def _unread(letter: str) -> str:
    return "" if letter else "the rule reads no answer"

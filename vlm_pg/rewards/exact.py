"""Exact answers: the same text but for how it is written."""

from __future__ import annotations

import re

from vlm_pg.rewards.latex_spelling import one_spelling
from vlm_pg.rewards.lead_ins import boxed_statement, without_lead_in
from vlm_pg.rewards.letter_case import is_formula, same_but_for_case
from vlm_pg.rewards.plain_text import MAX_LONG_CHARACTERS, plain, plain_formula, without_marks
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.units import parse_unit
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

_CLOSING = ".,;:!?\u3002\u3001 "
_QUANTITY = re.compile(r"-?[0-9][0-9.,]{0,30} ?(\D{1,24})")


def check_exact(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` is the gold answer but for how it is written, else 0.0.

    Left out on both sides: Unicode compatibility forms (NFKC), case (but not of symbols: "mV" is no "MV", "Co" no
    "CO"), spacing, closing punctuation, Markdown and quotes around it, LaTeX's layout and spellings of a formula, and a
    lead-in such as "The answer is".
    """
    if not normalized(sample.answer):
        return Verdict(None, f"gold answer {shorten(sample.answer)} is empty but for punctuation")
    if len(answer) > MAX_LONG_CHARACTERS:
        return Verdict(0.0, f"answer has more than {MAX_LONG_CHARACTERS} characters, which no exact answer has")
    readings = [answer] if (boxed := boxed_statement(answer)) is None else [answer, boxed]
    formulas = is_formula(sample.answer)
    is_same = any(
        same_but_for_case(read(text), read(sample.answer), formulas=formulas)
        for text in readings
        for read in (normalized, _core)
    )
    return Verdict(1.0 if is_same and not any(_have_other_units(text, sample.answer) for text in readings) else 0.0)


def normalized(text: str) -> str:
    """What is compared: normalized("Ｎew  York.") -> "New York"."""
    return " ".join(plain(text).split()).rstrip(_CLOSING)


def _core(text: str) -> str:
    """``normalized`` without lead-in and Markdown, formulas in one spelling: "150 µV" is "150µV"."""
    bare = without_marks(plain_formula(text)).rstrip(_CLOSING)
    stripped = without_marks(without_lead_in(bare).rstrip(_CLOSING)) or bare
    return one_spelling(normalized(stripped))


def _have_other_units(left: str, right: str) -> bool:
    """Whether both texts are a number with a unit, and the units are not the same."""
    found = [_QUANTITY.fullmatch(without_marks(plain(text)).rstrip(_CLOSING)) for text in (left, right)]
    units = [parse_unit(match[1]) for match in found if match]
    return len(units) == 2 and None not in units and len({(unit.kind, unit.factor) for unit in units if unit}) == 2

"""Yes or no: which of the two an answer says."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

Side = Literal["yes", "no"]

_SIDES: dict[str, Side] = {
    "yes": "yes", "yeah": "yes", "yep": "yes", "true": "yes",
    "no": "no", "nope": "no", "false": "no",
}  # fmt: skip
_LETTERS: dict[str, Side] = {"y": "yes", "t": "yes", "n": "no", "f": "no"}
_WORD = re.compile(
    rf"(?<![\w'’-])(?P<word>{'|'.join(_SIDES)})(?!\w|[-'’]\w)(?P<alone>\s{{0,4}}(?:$|[^\w\s]))?", re.IGNORECASE
)
# Both are looked for in the few characters before a word.
_NEGATED = re.compile(r"(?:\b(?:not|never|cannot)|n['’]t)\s{1,4}(?:\w{1,12}\s{1,4})?$", re.IGNORECASE)
_INTRODUCED = re.compile(r"\b(?:answer|answer\s{1,4}is|say|or)[\s:*\"'{]{1,6}$", re.IGNORECASE)
_CHARACTERS_BEFORE = 32
_DECORATION = "*_`\"'“”‘’$.,;:!?()[]{} \t\r\n"


def check_yes_no(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` says the same of yes and no as the gold answer, else 0.0.

    Understood: "yes", "True", "y", "No.", "Yes, because there is no car", "The answer is no.", "not true". An answer
    that says both, or neither, is wrong; a gold answer that does is "no value".
    """
    gold = stated_sides(sample.answer)
    if len(gold) != 1:
        return Verdict(None, f"gold answer {shorten(sample.answer)} says neither yes nor no, or both")
    stated = stated_sides(answer)
    if len(stated) != 1:
        return Verdict(0.0, "answer says both yes and no" if stated else "answer says neither yes nor no")
    return Verdict(1.0 if stated == gold else 0.0)


def stated_sides(text: str) -> set[Side]:
    """Which of yes and no ``text`` says: none, one or both."""
    plain = unicodedata.normalize("NFKC", text).strip(_DECORATION)
    if plain.lower() in _LETTERS:
        return {_LETTERS[plain.lower()]}
    sides: set[Side] = set()
    for match in _WORD.finditer(plain):
        before = plain[max(0, match.start() - _CHARACTERS_BEFORE) : match.start()]
        # Before a noun "no" is no answer ("there is no car") unless the text begins with it.
        if match["word"].lower() == "no" and before and match["alone"] is None and not _INTRODUCED.search(before):
            continue
        side = _SIDES[match["word"].lower()]
        sides.add(_other(side) if _NEGATED.search(before) else side)
    return sides


def _other(side: Side) -> Side:
    return "no" if side == "yes" else "yes"

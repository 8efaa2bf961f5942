"""Exact answers: the same text but for how it is written."""

from __future__ import annotations

import unicodedata

from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

_CLOSING = ".,;:!?\u3002\u3001 "


def check_exact(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` is the gold answer but for Unicode compatibility forms (NFKC), case, spacing and closing
    punctuation, else 0.0."""
    gold = normalized(sample.answer)
    if not gold:
        return Verdict(None, f"gold answer {shorten(sample.answer)} is empty but for punctuation")
    return Verdict(1.0 if normalized(answer) == gold else 0.0)


def normalized(text: str) -> str:
    """What is compared: normalized("Ｎew  York.") -> "new york"."""
    # Folding case can leave a form that NFKC changes again.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split()).rstrip(_CLOSING)

"""Transcribed text: one minus the word error rate."""

from __future__ import annotations

from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict
from vlm_pg.types import Sample


def check_ocr(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1 - WER, held in [0, 1]; WER is the word edit distance divided by the number of gold words.

    Words are what white space separates; case and punctuation count, since they are part of what is written.
    """
    if not sample.answer.split():
        return Verdict(None, "gold answer is empty")
    import jiwer  # heavy, and most runs have no such answers

    return Verdict(max(0.0, 1.0 - float(jiwer.wer(" ".join(sample.answer.split()), " ".join(answer.split())))))

"""Transcribed text: one minus the word error rate."""

from __future__ import annotations

from vlm_pg.rewards.plain_text import MAX_LONG_CHARACTERS, plain_short, words
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict
from vlm_pg.types import Sample


def check_ocr(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1 - WER, held in [0, 1]; WER is the word edit distance divided by the number of gold words.

    Words are what white space separates, and each character of a script without gaps between words (Chinese, Japanese,
    Thai ...), so that there it is the character error rate. Punctuation counts, since it is part of what is written,
    and so does case unless ``ocr_case_sensitive`` is off. Unicode compatibility forms (NFKC) do not.
    """
    gold = _words(sample.answer, settings)
    if not gold:
        return Verdict(None, "gold answer is empty")
    import jiwer  # heavy, and most runs have no such answers

    return Verdict(max(0.0, 1.0 - float(jiwer.wer(" ".join(gold), " ".join(_words(answer, settings))))))


def _words(text: str, settings: RewardSettings) -> list[str]:
    normal = plain_short(text, MAX_LONG_CHARACTERS)
    return words(normal if settings.ocr_case_sensitive else normal.casefold())

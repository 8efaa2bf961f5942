"""Repetition: the share of word n-grams that are not repeats."""

from __future__ import annotations

import re

from vlm_pg.rewards.settings import RepetitionSettings

# Thai, Lao, Myanmar, Khmer, kana, Han: written without spaces between words, so that each character counts as one.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


def repetition_reward(text: str, settings: RepetitionSettings) -> float:
    """Number of different n-grams divided by the number of all: 1.0 without repetition, near 0 for a loop.

    Words are what white space separates, without case; characters of scripts without spaces are words of their own.
    A text of fewer than ``ngram`` words repeats nothing.
    """
    words = _WORD.findall(text.casefold())
    num_ngrams = len(words) - settings.ngram + 1
    if num_ngrams < 1:
        return 1.0
    return len({tuple(words[start : start + settings.ngram]) for start in range(num_ngrams)}) / num_ngrams

"""Repetition: the share of word n-grams that are not repeats."""

from __future__ import annotations

from vlm_pg.answers.plain_text import words as words_of
from vlm_pg.rewards.settings import RepetitionSettings


def repetition_reward(text: str, settings: RepetitionSettings) -> float:
    """Number of different n-grams divided by the number of all: 1.0 without repetition, near 0 for a loop.

    Words are what white space separates, without case; characters of scripts without spaces are words of their own.
    A text of fewer than ``ngram`` words repeats nothing.
    """
    words = words_of(text.casefold())
    num_ngrams = len(words) - settings.ngram + 1
    if num_ngrams < 1:
        return 1.0
    return len({tuple(words[start : start + settings.ngram]) for start in range(num_ngrams)}) / num_ngrams

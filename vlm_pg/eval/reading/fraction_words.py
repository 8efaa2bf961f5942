"""Fractions told in English words, written as digits: "three quarters" is 3/4."""

from __future__ import annotations

import re

from vlm_pg.answers.numbers import ONES

_PARTS = "half=halves third quarter=fourth fifth sixth seventh eighth ninth tenth"
_NUMERATORS = {word: place for place, word in enumerate(ONES[1:10], start=1)}
_DENOMINATORS = {word: place for place, words in enumerate(_PARTS.split(), start=2) for word in words.split("=")}
_WORDS = rf"(?<![\w-])({'|'.join(_NUMERATORS)})[\s-]({'|'.join(_DENOMINATORS)})s?(?![\w-])"
_FRACTION = re.compile(_WORDS, re.IGNORECASE)
_OF_A_UNIT = re.compile(
    rf"{_WORDS}\sof\s(?:an?|one)\s(?=(?:hour|minute|second|day|week|month|year|met(?:er|re)|kilomet(?:er|re)|mile|"
    r"foot|inch|lit(?:er|re)|gallon|kilo(?:gram)?|gram|pound|ton(?:ne)?|dollar|euro)\b)",
    re.IGNORECASE,
)


def fractions_for_words(text: str) -> str:
    """``text`` with digits for fractions in words; a half alone, and "a third", which may be a place, stay words.

    fractions_for_words("One third of them") -> "1/3 of them"
    """
    return _FRACTION.sub(_digits, text)


def parts_of_units(text: str) -> str:
    """``text`` with digits for fractions of one unit: "three quarters of an hour" -> "3/4 hour"."""
    return _OF_A_UNIT.sub(lambda match: f"{_digits(match)} ", text)


def _digits(match: re.Match[str]) -> str:
    return f"{_NUMERATORS[match[1].lower()]}/{_DENOMINATORS[match[2].lower()]}"

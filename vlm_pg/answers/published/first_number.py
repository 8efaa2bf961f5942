"""The first number of an output, in figures or in English words, as lmms-eval reads VSI-Bench since 0.7."""

from __future__ import annotations

import re

from vlm_pg.answers.numbers import ONES, TENS

_WORDS = {word: value for value, word in enumerate(ONES)}
_WORDS |= {word: 10 * value for value, word in enumerate(TENS, start=2)}
_WORDS |= {"hundred": 100, "thousand": 1000}

_FIGURES = re.compile(r"-?\d+(?:\.\d+)?")
_LETTERS = re.compile(r"[a-z]+")


def first_number(output: str) -> float | None:
    """The first figures or number words of ``output``, whichever come first; None without any.

    A run of number words goes on over "and" and over anything that is no word, and its values are added up: "one, two"
    is 3. "a" is no number word.

    first_number("Twenty-one chairs, 4 tables") -> 21.0
    """
    text = output.strip().lower()
    figures = _FIGURES.search(text)
    start, values = _first_words(text)
    if figures is not None and (start is None or figures.start() < start):
        return float(figures[0])
    return None if start is None else _sum_of(values)


def _first_words(text: str) -> tuple[int | None, list[int]]:
    """Where the first run of number words begins, and their values."""
    start: int | None = None
    values: list[int] = []
    for word in _LETTERS.finditer(text):
        value = _WORDS.get(word[0])
        if value is not None:
            start = word.start() if start is None else start
            values.append(value)
        elif start is not None and word[0] != "and":
            break
    return start, values


def _sum_of(values: list[int]) -> float:
    total = current = 0
    for value in values:
        if value == 1000:
            total, current = total + max(current, 1) * 1000, 0
        elif value == 100:
            current = max(current, 1) * 100
        else:
            current += value
    try:
        return float(total + current)
    except OverflowError:
        return float("inf")

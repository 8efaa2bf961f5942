"""Options of the same words in different orders: which one tells of the same things in the same order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from vlm_pg.eval.reading.stems import words_in

_STEP = re.compile(
    r"→|->|=>|⇒|>|\bthen\b|\bbefore\b|\bafter\b|\bfollowed\b|\bfirst\b|\bfrom\b|\bfinally\b|[,;\n]", re.IGNORECASE
)
_BEFORE = re.compile(r"^\W{0,4}before\s([^,\n]{1,120}),\s?(.{1,200})$", re.IGNORECASE | re.DOTALL)
_AFTER = re.compile(r"^([^,\n]{1,200}?)\safter\s([^,\n]{1,120})$", re.IGNORECASE | re.DOTALL)
_THING = re.compile(r"\b(?:the|a|an|his|her|their)\s([^\W\d_]{2,30})", re.IGNORECASE)
_PRONOUN = re.compile(r"\b(?:it|them)\b", re.IGNORECASE)
_LONGEST_STRING = 8


class OptionOrders:
    """The options of a question that differ in nothing but the order of their words; there may be none."""

    def __init__(self, texts: Mapping[str, str], ignored: frozenset[str]) -> None:
        self._strings = _strings(texts)
        words = {letter: words_in(text) for letter, text in texts.items()}
        every = [text for text in texts.values() if text]
        # "First stir the soup, then taste it": a thing that a pronoun stands for has no place of its own.
        things = {
            word for text in every if _PRONOUN.search(text) for name in _THING.findall(text) for word in words_in(name)
        }
        self._order = {
            letter: [w for w in own if w not in ignored and w not in things] for letter, own in words.items()
        }
        groups: dict[tuple[str, ...], list[str]] = {}
        for letter, order in self._order.items():
            groups.setdefault(tuple(sorted(order)), []).append(letter)
        ordered = {letter for group in groups.values() if len(group) > 1 and groups for letter in group}
        self._words = frozenset(word for letter in ordered for word in self._order[letter])
        # One of the same few words belongs to them: "turn left, turn left" beside "turn left, turn right".
        if ordered:
            ordered |= {letter for letter, order in self._order.items() if order and set(order) <= self._words}
        self.letters = frozenset(ordered)

    def named(self, text: str) -> str | None:
        """The one option whose order ``text`` tells, at least half of it; None without one.

        named("Before tasting the soup he stirs it.") tells of stirring, then of tasting.
        """
        if self._strings:
            told = "".join(word for word in re.findall(r"(?<![\w'’])[^\W_](?![\w'’])", text.casefold()))
            return next((letter for letter, string in self._strings.items() if string == told), None)
        if not self.letters or not _STEP.search(text):
            return None
        order = [word for word in words_in(_reordered(text)) if word in self._words]
        same = [
            letter
            for letter in sorted(self.letters)
            if len(order) * 2 >= len(self._order[letter]) and _is_within(order, self._order[letter])
        ]
        exact = [letter for letter in same if order == self._order[letter]]
        same = exact or same
        return same[0] if len(same) == 1 and len(order) > 1 else None


def _strings(texts: Mapping[str, str]) -> dict[str, str]:
    """Options that are orders of the same letters: "bac", "cab"."""
    strings = {letter: text.casefold().strip(" .") for letter, text in texts.items()}
    same = {"".join(sorted(string)) for string in strings.values()}
    is_short = all(1 < len(string) <= _LONGEST_STRING and string.isalnum() for string in strings.values())
    return strings if len(same) == 1 and is_short and len(strings) > 1 else {}


def _is_within(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Whether ``part`` is ``whole`` with some words left out."""
    rest = iter(whole)
    return all(word in rest for word in part)


def _reordered(text: str) -> str:
    """``text`` in the order of what it tells: "Before X, Y" -> "Y, then X"."""
    if found := _BEFORE.match(text) or _AFTER.match(text):
        return f"{found[2]}, then {found[1]}"
    return text

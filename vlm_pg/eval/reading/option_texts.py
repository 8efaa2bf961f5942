"""Which option a statement names by its text, in whole or in words that belong to that option alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vlm_pg.eval.reading.stems import stem, words_in
from vlm_pg.rewards.clauses import clauses
from vlm_pg.rewards.options import Choices, folded
from vlm_pg.rewards.plain_text import NO_GAPS

_STOP = frozenset(
    words_in(
        "a an the of to is are was were be been being it its it's he she they him his her hers them their i you we me my "
        "your our and with that this these those there here at by for as into onto has have had do does did will would "
        "can could may might must should so also then first finally next who which what when where while because since "
        "or if than just very too something someone thing one's s t down's in on out off from again only"
    )
)
# These count only where options differ by them.
_OPPOSITES = (("in", "out"), ("on", "off"))
_STEP = re.compile(
    r"→|->|=>|⇒|>|\bthen\b|\bbefore\b|\bafter\b|\bfollowed\b|\bfirst\b|\bfrom\b|\bfinally\b|[,;\n]", re.IGNORECASE
)
_BEFORE = re.compile(r"^\W{0,4}before\s([^,\n]{1,120}),\s?(.{1,200})$", re.IGNORECASE | re.DOTALL)
_AFTER = re.compile(r"^(.{1,200}?)\safter\s([^,\n]{1,120})$", re.IGNORECASE | re.DOTALL)
_AGREEING = re.compile(
    r"\b(?:that|you|this)(?:['’]s|['’]re|\sis|\sare)\s(?:quite\s|absolutely\s)?right\b(?!\s(?:hand|side|of))|"
    r"^\W{0,4}(?:all\s)?right\s?[,!.](?=\s\S)|\bright(?=\s(?:answers?|options?|choices?|one|now)\b)|,\sright(?=\?)",
    re.IGNORECASE,
)
_LEAVING = re.compile(
    r"\b(?:has|have|had|is|was|been)\s(?:\w{1,12}\s)?left(?=\s(?:the|his|her|their|it|a|an|by)\b)", re.IGNORECASE
)
_FROM = re.compile(r"\bfrom\s(?:the\s)?[\w-]{1,30}(?=\sto\s)", re.IGNORECASE)
_SET_ASIDE = re.compile(
    r"^\W{0,4}(?:although|though|while|whereas|even though|besides|apart from|unlike|contrary to)\s[^,\n]{1,300}(?:,|$)|"
    r"\bnear\sthe\s[^,.\n]{1,40}",
    re.IGNORECASE,
)
_EARLIER = re.compile(r"^[^,]{0,80}\bhad\sbeen\s[^,]{1,120}(?:,\s?(?:and\s|but\s)?|$)", re.IGNORECASE)
_HYPOTHETICAL = re.compile(
    r"\b(?:would|might|could)\s(?:not\s)?(?:have\s)?(?:be|been|mean|need|show|have)\b|^\W{0,4}if\b", re.IGNORECASE
)
_PLACEHOLDER = "optxt"
_MASK = re.compile(rf"\b{_PLACEHOLDER}([A-Z])\b")
_LABELLED = re.compile(r"\b([a-z]{3,20})\s([A-Z])\b(?!['’])", re.IGNORECASE)
_EXPLAINS = re.compile(r"\W{0,4}(?:because|since|as|for|so that|given|judging)\b|\W{0,3}$", re.IGNORECASE)


@dataclass(frozen=True)
class Named:
    """The letters that a statement names by their texts. ``is_whole``: the whole text, or all words that tell it."""

    letters: frozenset[str]
    is_whole: bool


class OptionTexts:
    """The texts of a question's options, prepared for comparison."""

    def __init__(self, choices: Choices, question: str) -> None:
        self.choices = dict(choices)
        self._has_from = any(re.search(r"\bfrom\b", text, re.IGNORECASE) for text in self.choices.values())
        self._folded = {letter: folded(text) for letter, text in choices}
        every = {letter: tuple(words_in(text)) for letter, text in choices}
        self._all = {letter: frozenset(words) for letter, words in every.items()}
        together: frozenset[str] = frozenset().union(*self._all.values())
        counted = {word for pair in _OPPOSITES if set(pair) <= together for word in pair}
        counted |= {word for word in ("only", "first") if word in together and word not in words_in(question)}
        stop = _STOP - counted
        asked = frozenset(words_in(question))
        common = frozenset.intersection(*self._all.values()) if len(self._all) > 1 else frozenset()
        telling = {letter: words - stop - common for letter, words in self._all.items()}
        # What the question says tells nothing, unless it lists the options.
        without_asked = {letter: words - asked for letter, words in telling.items()}
        self._telling = without_asked if all(without_asked.values()) else telling
        self._words: frozenset[str] = frozenset().union(*self._telling.values())
        self._order = {
            letter: _sequence(every[letter], self._all[letter] - stop - asked or self._all[letter] - stop)
            for letter in every
        }
        orders: dict[tuple[str, ...], list[str]] = {}
        for letter, order in self._order.items():
            orders.setdefault(tuple(sorted(order)), []).append(letter)
        # Options of the same words in different orders: which came first tells them apart.
        self._ordered = {letter for group in orders.values() if len(group) > 1 for letter in group}
        self._ordered_words: frozenset[str] = frozenset(
            word for letter in self._ordered for word in self._order[letter]
        )
        self._ordered_words |= self._words if self._ordered else frozenset()
        longest_first = sorted(self._folded.items(), key=lambda pair: -len(pair[1]))
        self._masks = [(letter, _whole_pattern(text)) for letter, text in longest_first if len(text) > 1]
        # Where the options are letters themselves: "point A" is a text, "A" is a letter.
        self._labels = {text: letter for letter, text in choices if len(text) == 1 and text.isalpha()}
        self._asked = asked

    def named(self, sentence: str) -> Named | None:
        """What ``sentence`` affirms by options' texts; None if it names no option. No letters: it is not clear which."""
        return self.named_in_masked(self.masked(sentence))

    def named_in_masked(self, sentence: str) -> Named | None:
        """As ``named`` of a sentence in which whole texts are masked."""
        whole: set[str] = set()
        rejected: set[str] = set()
        parts: list[str] = []
        for clause in clauses(_EARLIER.sub("", _SET_ASIDE.sub(" ", sentence))):
            letters = placeholders(clause.text)
            if clause.is_affirmed:
                whole |= letters
                parts.append(clause.text)
            elif letters:
                rejected |= letters
            elif (loose := self._loose(clause.text, frozenset())) and len(loose.letters) == 1:
                rejected |= loose.letters
        whole -= rejected
        if (
            len(whole) > 1
            and parts
            and len(first := placeholders(parts[0])) == 1
            and _EXPLAINS.match(sentence[sentence.find(parts[0]) + len(parts[0]) :])
        ):
            whole = first
        if whole:
            return Named(frozenset(whole), True)
        return self._loose(", ".join(without_placeholders(part) for part in parts), frozenset(rejected))

    def named_by_order(self, text: str) -> Named | None:
        """The option whose steps are all that ``text`` tells of, in the same order."""
        if not self._ordered:
            return None
        text = _reordered(text)
        told = _sequence(words_in(text), self._ordered_words)
        same = {letter for letter in self._ordered if told and told == self._order[letter]}
        return Named(frozenset(same), True) if len(same) == 1 and _STEP.search(text) else None

    def is_whole_text(self, text: str) -> str | None:
        """The letter of the option whose text ``text`` is; None without one, or with several."""
        short = folded(text)
        same = [letter for letter, own in self._folded.items() if own and own == short]
        if not same and len(words := words_in(text)) <= 40:
            bare = [word for word in words if word not in ("a", "an", "the")]
            same = [
                l
                for l in self.choices
                if bare and bare == [w for w in words_in(self.choices[l]) if w not in ("a", "an", "the")]
            ]
        return same[0] if len(same) == 1 else None

    def masked(self, text: str) -> str:
        """``text`` with a word of its own in place of each option's whole text, so that its letters are none."""
        text = _LEAVING.sub(" ", _AGREEING.sub(" ", text))
        text = text if self._has_from else _FROM.sub(" ", text)
        for letter, pattern in self._masks:
            text = pattern.sub(f" {_PLACEHOLDER}{letter} ", text)
        return _LABELLED.sub(self._mask_label, text) if self._labels else text

    def unmasked(self, text: str) -> str:
        """``text`` with options' texts in place of the words that mask them."""
        return _MASK.sub(lambda mask: self.choices.get(mask[1], ""), text)

    def _mask_label(self, found: re.Match[str]) -> str:
        letter = self._labels.get(found[2])
        return f"{_PLACEHOLDER}{letter} " if letter and stem(found[1]) in self._asked else found[0]

    def _loose(self, text: str, rejected: frozenset[str]) -> Named | None:
        if self._ordered and (ordered := self.named_by_order(text)):
            return ordered
        left = [letter for letter in self.choices if letter not in rejected]
        of_left: frozenset[str] = (
            frozenset().union(*(self._telling[letter] for letter in left)) if left else frozenset()
        )
        told = frozenset(words_in(text)) & of_left
        if not told:
            return None
        fitting = [letter for letter in left if told <= self._all[letter]]
        full = [letter for letter in left if self._telling[letter] and self._telling[letter] <= told]
        if len(fitting) > 1:
            fitting = [letter for letter in fitting if letter in full] or fitting
        if len(fitting) == 1 and fitting[0] not in self._ordered:
            return Named(frozenset(fitting), fitting[0] in full)
        if not fitting and len(full) == 1 and len(self._telling[full[0]]) > 1:
            return Named(frozenset(full), True)
        return Named(frozenset(full if len(full) > 1 else ()), bool(full))


@lru_cache(maxsize=512)
def option_texts(choices: Choices, question: str) -> OptionTexts:
    """The texts of ``choices``, prepared; remembered, since many outputs are read with the same ones."""
    return OptionTexts(choices, question)


def _whole_pattern(text: str) -> re.Pattern[str]:
    words = r"\s{1,3}".join(re.escape(word) for word in text.split())
    has_gaps = re.search(f"[{NO_GAPS}]", text) is None
    return re.compile(rf"(?<![\w'’]){words}(?![\w'’])" if has_gaps else words, re.IGNORECASE)


def placeholders(text: str) -> set[str]:
    """The letters of the options whose whole texts are masked in ``text``."""
    return {match[1] for match in _MASK.finditer(text)}


def without_placeholders(text: str) -> str:
    """``text`` without the words that mask options' texts."""
    return _MASK.sub(" ", text)


def _sequence(words: Sequence[str], counted: frozenset[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word in counted)


def _reordered(text: str) -> str:
    """``text`` in the order of what it tells: "Before X, Y" -> "Y, X"."""
    if found := _BEFORE.match(text):
        return f"{found[2]}, then {found[1]}"
    if found := _AFTER.match(text):
        return f"{found[2]}, then {found[1]}"
    return text

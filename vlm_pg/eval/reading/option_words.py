"""The words of options and of what is said, and what makes a statement another one in spite of equal words."""

from __future__ import annotations

import re

from vlm_pg.answers.plain_text import WORD_LETTER
from vlm_pg.eval.reading.stems import stem, words_in

STOP = frozenset(
    words_in(
        "a an the of to is are was were be been being it its it's he she they him his her hers them their i you "
        "we me my "
        "your our and with that this these those there here at by for as into onto has have had do does did will would "
        "can could may might must should so also then first finally next who which what when where while because since "
        "or if than just very something someone thing one's s t down's in on out off from again only"
    )
)
# These count only where options differ by them.
PLACE_OPPOSITES = (("in", "out"), ("on", "off"))
_AGENT = re.compile(r"\W{0,4}(?:the|her|his|their)\s(\w{2,20})\s\w{2,20}s\s(?:her|him|them|it)\b", re.IGNORECASE)
_PRONOUN = re.compile(r"\W{0,4}(?:she|he|they|it)\s", re.IGNORECASE)
_NAMED_A = re.compile(r"\bA\b(?!\s[^\W\d_A-Z])")
_FEWEST_ALIKE = 4
_SIGNED = re.compile(
    rf"(?<!{WORD_LETTER})(?<![0-9_.)\]])"
    r"[-+]?[$€£]?(?:[0-9]+(?:[.,:/][0-9]+)*|\.[0-9]+)%?"
    rf"(?!{WORD_LETTER}|[0-9_])"
)


def option_words(text: str) -> list[str]:
    """As ``words_in``; a capital A that is no article is a word of its own ("Team A"), so is a number with its sign."""
    words: list[str] = []
    end = 0
    for number in _SIGNED.finditer(text):
        words += [*_words(text[end : number.start()]), number[0].replace(",", "").removeprefix("+")]
        end = number.end()
    return words + _words(text[end:])


def _words(text: str) -> list[str]:
    return words_in(_NAMED_A.sub("a_", text).replace("a_", "lettera"))


def is_opposed(option: frozenset[str], told: frozenset[str]) -> bool:
    """Whether a statement has "off" or "out" where an option has "on" or "in"."""
    pairs = list(PLACE_OPPOSITES) + [(other, one) for one, other in PLACE_OPPOSITES]
    return any(one in option and other in told and one not in told for one, other in pairs)


def is_substituted(option: list[str], told: list[str]) -> bool:
    """Whether a statement is an option but for one word that says another thing: "she calls her sister"."""
    if len(option) != len(told) or len(option) < _FEWEST_ALIKE:
        return False
    other = [(one, word) for one, word in zip(option, told, strict=True) if one != word]
    return len(other) == 1 and not set(other[0]) & STOP


def is_done_to(option: str, told: str) -> bool:
    """Whether a statement has another do what an option's "she" does: "her brother calls her"."""
    agent = _AGENT.match(told)
    return agent is not None and _PRONOUN.match(option) is not None and stem(agent[1]) in option_words(option)

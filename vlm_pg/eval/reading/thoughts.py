"""Decisions for a thought by its place: "My first instinct was A. I stay with my first instinct." decides for A."""

from __future__ import annotations

import re

_KIND = r"(?:instinct|thought|guess|choice|idea|impression|answer|pick|hunch|intuition|reaction)"
_PLACE = r"(?:first|second|third|initial|original|last)"
_THOUGHT = re.compile(
    rf"\b(?:my|the)\s({_PLACE})\s({_KIND})\s(?:is|was|would\sbe|had\sbeen)\s(?:option\s)?\(?([A-Z])\)?(?=\W{{0,3}}(?:$|[.!;,\n]))",
    re.IGNORECASE,
)
_DECISION = re.compile(
    rf"(?:(?:so|thus|therefore|in\sthe\send|overall|finally|after\sall),?\s)?I(?:\swill|['’]ll|\sam\sgoing\sto|['’]m\sgoing\sto|"
    rf"\swould|['’]d)?\s(?:still\s)?(?:stay|stick|go|keep|trust|follow)(?:ing)?\s(?:(?:with|to|by)\s)?(?:my|the)\s({_PLACE})\s({_KIND})"
    r"(?=\s{0,2}(?:$|[.!\n]))",
    re.IGNORECASE,
)


def with_decisions_named(text: str) -> str:
    """``text`` with the letter of the thought that it decides for, where one thought alone has that name.

    with_decisions_named("My first guess was A. I keep to my first guess.") ends in "So the answer is A."
    """
    thoughts: dict[tuple[str, str], set[str]] = {}
    for place, kind, letter in _THOUGHT.findall(text):
        thoughts.setdefault((place.casefold(), kind.casefold()), set()).add(letter)

    def named(found: re.Match[str]) -> str:
        letters = thoughts.get((found[1].casefold(), found[2].casefold()), set())
        if letters:
            return f"So the answer is {min(letters)}" if len(letters) == 1 else found[0]
        others = {letter for (_, kind), told in thoughts.items() if kind == found[2].casefold() for letter in told}
        # A decision for another thought than those told of is one against them.
        return f"So the answer is not {min(others)}" if len(others) == 1 else found[0]

    return _DECISION.sub(named, text) if thoughts else text

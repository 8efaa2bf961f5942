"""Words of opposite meaning: who says the one does not say the other."""

from __future__ import annotations

from collections.abc import Collection

from vlm_pg.eval.reading.stems import words_in

# What is one of these is not the other: who counts the ones does not count the others.
_STATES = (
    "increasing decreasing", "growing shrinking", "rising falling", "open closed", "opening closing", "empty full",
    "wet dry", "true false", "standing sitting", "moving stationary", "pushing pulling", "accelerating decelerating",
    "pass fail", "win lose", "accept reject", "survive die", "agree disagree",
    "correct wrong", "correct incorrect", "present absent", "profit loss", "gain loss", "employed unemployed",
    "urban rural", "married single", "found lost", "used unused", "dead alive",
)  # fmt: skip
# Who does a thing: that the one does it says nothing of the other.
_PERSONS = ("boy girl", "man woman", "male female")
# Between two things, or of two places or times.
_RELATIONS = (
    "bigger smaller", "larger smaller", "big small", "large small", "left right", "up down", "upward downward",
    "faster slower", "inside outside", "higher lower", "above below", "more fewer", "more less", "longer shorter",
    "taller shorter", "lighter darker", "brighter darker", "forward backward", "clockwise counterclockwise",
    "clockwise anticlockwise", "hot cold", "same different", "before after", "on off", "front behind",
    "smaller growing", "bigger shrinking", "approaching leaving", "day night",
)  # fmt: skip
PERSONS = tuple(frozenset(words_in(pair)) for pair in _PERSONS)
STATES = (*(frozenset(words_in(pair)) for pair in _STATES), *PERSONS)
OPPOSITES = (*STATES, *(frozenset(words_in(pair)) for pair in _RELATIONS))


def says_opposite(told: Collection[str], asked: Collection[str], pairs: tuple[frozenset[str], ...] = OPPOSITES) -> bool:
    """Whether ``told`` has the opposite of a word of ``asked``, and not that word itself; both as ``words_in`` gives.

    says_opposite(words_in("20% failed"), words_in("What percentage passed?")) -> True
    """
    told, asked = set(told), set(asked)
    return any(pair & asked and (pair - asked) & told and not pair & asked & told for pair in pairs)

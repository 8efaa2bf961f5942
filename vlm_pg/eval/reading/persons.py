"""Other names that people go by: where people are asked for, a count of anything else is none of them."""

from __future__ import annotations

import re

from vlm_pg.eval.reading.stems import stem, words_in

_PERSONS = frozenset(
    words_in(
        "person human individual man woman adult child kid boy girl baby visitor guest player student pupil "
        "teacher worker employee customer client spectator member friend pedestrian passenger driver dancer "
        "singer musician actor actress performer athlete runner swimmer skier surfer cyclist hiker climber "
        "soldier officer policeman firefighter doctor nurse patient chef cook waiter waitress tourist speaker "
        "host presenter judge contestant participant competitor bystander onlooker neighbour neighbor parent "
        "brother sister son daughter lady gentleman gentlemen teenager senior male female figure character "
        "viewer voter resident citizen colleague fan reporter scientist other ones total"
    )
)
_ASKED = ("people", "person", "human")
# The first plural behind a count, at most three words after it.
_COUNTED = re.compile(
    r"\s{1,3}(?!(?:in|on|at|by|who|near|behind|visible|and|or|of|to|for|as|is|was|has|during|across|from|it|this|there)\b)"
    r"((?:[a-z-]{2,20}\s){0,3}?(?:[a-z]{2,20}['’]s?\s)?[a-z]{2,20}s)\b",
    re.IGNORECASE,
)


def are_things(text: str, noun: str) -> bool:
    """Whether ``text``, which follows a count, names what is no person where ``noun`` asks for people.

    are_things(" red cups", "people") -> True
    """
    counted = _COUNTED.match(text) if noun in _ASKED else None
    if counted is None:
        return False
    words = counted[1].split()
    # "Women's shoes" are shoes.
    words = words[-1:] if re.search("['’]", counted[1]) else words
    return not any(stem(word) in _PERSONS for word in words)

"""What a sentence says of the thing that is asked about, where it tells of another thing in the same breath."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from vlm_pg.eval.reading.stems import stem, words_in

_JOINS = re.compile(r",?\s(?:and(?:\sthen)?|while|whereas|but)\s|;\s|,\s(?=(?:the|an?)\s)", re.IGNORECASE)
_TIMES = frozenset(
    words_in(
        "a an the he she it they them person from to between at until till then again and s sec second seconds minute "
        "minutes about around is are was were by in of up"
    )
)
_FEWEST_DEEDS = 2
# The verb follows at once: "the door frame is" tells of no door.
_SUBJECT = r"\W{0,4}(?:the|an?)\s(\w{1,20})\s"
_IS = re.compile(rf"{_SUBJECT}(?:is|are|was|were)\s", re.IGNORECASE)
_DOES = re.compile(rf"{_SUBJECT}(?:is|are|was|were|\w{{2,20}}(?:s|ed))\s", re.IGNORECASE)


def about_the_asked(
    sentence: str, asked: Collection[str], says: Callable[[str], bool], *, any_verb: bool = False
) -> str:
    """The part of ``sentence`` that is about a thing of the question; all of it where that is not clear.

    It is clear where each part has a subject of its own and says something, and the subject of one part alone is asked
    about: of "the window is left and the door is right", asked for the door, "the door is right".

    Args:
        sentence: one sentence.
        asked: the stems of the question's words.
        says: whether a part says what could be an answer.
        any_verb: whether the subjects may do other things than be.
    """
    parts = _JOINS.split(sentence)
    subjects = [found[1] if (found := (_DOES if any_verb else _IS).match(part)) else "" for part in parts]
    if len(parts) < 2 or not all(subjects) or not all(says(part) for part in parts):
        return sentence
    of_asked = [part for part, subject in zip(parts, subjects, strict=True) if stem(subject) in asked]
    return of_asked[0] if len(of_asked) == 1 else sentence


def of_the_deed(sentence: str, asked: Collection[str], says: Callable[[str], bool]) -> str:
    """The part of ``sentence`` that tells of the deed asked about; all of it where that is not clear.

    It is clear where each part says something, and the parts tell of one thing and differ in what is done with it: each
    other part has one word that is not asked about, its verb, and all words of the one part are: of "she opens the bag
    from 2 to 5 and closes it from 10 to 14", asked for closing the bag, "closes it from 10 to 14".

    Args:
        sentence: one sentence.
        asked: the stems of the question's words.
        says: whether a part says what could be an answer.
    """
    parts = _JOINS.split(sentence)
    if len(parts) < _FEWEST_DEEDS or not all(says(part) for part in parts):
        return sentence
    told = [{word for word in words_in(part) if not word.isdecimal()} - _TIMES for part in parts]
    strange = [words - set(asked) for words in told]
    of_asked = [place for place, words in enumerate(strange) if not words and told[place]]
    is_clear = len(of_asked) == 1 and all(
        len(words) == 1 for place, words in enumerate(strange) if place != of_asked[0]
    )
    return parts[of_asked[0]] if is_clear else sentence

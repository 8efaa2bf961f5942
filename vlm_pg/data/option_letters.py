"""The letters that options are written with: which are theirs for sure, which are doubtful."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vlm_pg.data.fields import fault, field

# "A. red", "A) red", "(A) red", "A: red"; not "A.M.".
OPTION = re.compile(r"\s*\(?([A-Z])\s*[.):](?![A-Za-z][.)])\s*(.*)", re.DOTALL)
# "A.U.S. Army" too, which may be a letter before "U.S. Army".
_GLUED = re.compile(r"\s*\(?([A-Z])[.):]\s*(\S.*)", re.DOTALL)
LETTER = re.compile(r"\(?([A-Za-z])\)?[.:)]?")
# So many options may have been lost of a list that still has its letters.
_LOST = 2
# From so many options on letters may come in another order: no four texts begin with A, B, C and D by chance.
_TURNED = 4


class Closed(NamedTuple):
    """Options with the letters from A on, after some were lost, and the letter of the right one."""

    options: tuple[str, ...]
    letter: str


def options_of(record: Mapping[str, Any], gold: str = "") -> tuple[str, ...]:
    """The options with their letters; options written without any get theirs, in order.

    A capital and a point before each are letters only if they are those from A on in order, or four and more of them
    in another: "E. coli", "S. aureus" are texts. What may be letters all the same, some lost or turned, is refused:
    which option "B" means, the second or the one that begins so, nobody can know. Where some are lost and the gold
    answer gives its option's text, they get those from A on (``close_gap``).

    Args:
        record: ``options``.
        gold: the gold answer without tags, as it is written.
    """
    options = field(record, "options", list, default=[])
    if not all(isinstance(option, str) for option in options):
        raise fault("wrong_type", "'options' holds something that is not a string", "A list of strings", "it")
    if have_letters(options):
        return tuple(options)
    if glued := unglued(options):
        return tuple(f"{letter}. {text}" for letter, text in glued)
    if closed := close_gap(options, gold):
        return closed.options
    letters = [letter for letter, _ in map(_parted, options) if letter]
    if len(options) > len(string.ascii_uppercase) or (letters and max(letters) <= _last_of(len(options))):
        raise fault(
            "bad_options",
            f"'options' are {len(options)}, of which {len(letters)} begin with the letters {letters[:26]}",
            "The letters from A on in order before all of at most 26 options, as in 'A. red', or before none, or, "
            "where some are lost, an answer that is the right one's text",
            "them",
        )
    return tuple(f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False))


def option_texts(options: Sequence[str]) -> dict[str, str]:
    """Texts by letter: option_texts(["A. red", "(B) .5"]) == {"A": "red", "B": ".5"}.

    ``options``: with their letters, as ``options_of`` returns them.
    """
    return dict(map(_parted, options))


def have_letters(options: Sequence[str]) -> bool:
    """Whether options surely are written with their letters; see ``options_of``."""
    letters = [letter for letter, _ in map(_parted, options)]
    known = list(string.ascii_uppercase[: len(options)])
    return bool(options) and (letters == known or (len(options) >= _TURNED and sorted(letters) == known))


def unglued(options: Sequence[str]) -> list[tuple[str, str]]:
    """Letters and texts of options of which some run together, as in "A.U.S. Army", "B. NATO"; none of others.

    All must begin with their letters in order, one of them as is written nowhere else: "A.D.", "B.C." are texts. As
    letters and places agree, no answer means another option for it.
    """
    found = [_GLUED.fullmatch(option) for option in options]
    parted = [(match[1], match[2].strip()) for match in found if match]
    in_order = [letter for letter, _ in parted] == list(string.ascii_uppercase[: len(options)])
    return parted if in_order and len(parted) == len(options) and any(map(OPTION.match, options)) else []


def is_gap(letters: Sequence[str]) -> bool:
    """Whether these are the letters from A on in order, of which a few are lost: A, B, D."""
    ordered = all(first < second for first, second in pairwise(letters))
    whole = list(letters) == list(string.ascii_uppercase[: len(letters)])
    return len(letters) > 1 and letters[0] == "A" and ordered and not whole and letters[-1] <= _last_of(len(letters))


def close_gap(options: Sequence[str], gold: str, same: Callable[[str, str], bool] = str.__eq__) -> Closed | None:
    """Options that have lost some of their letters with those from A on, if the gold answer gives the right one's text.

    close_gap(["A. red", "B. blue", "D. green"], "D. green") == Closed(("A. red", "B. blue", "C. green"), "C")

    None for other options, where the answer is but a letter, which may count what was lost or not, or fits no option or
    several, and where a text has one of the letters in it that would be another's ("both C and D", "blue C. green").

    Args:
        options: as they are written.
        gold: without tags: a text, alone or with the letter that is written before it.
        same: whether two texts are the same.
    """
    parted = list(map(_parted, options))
    letters = [letter for letter, _ in parted]
    bare = LETTER.fullmatch(gold.strip())
    if not all(letters) or not is_gap(letters) or (bare and bare[1].upper() <= _last_of(len(options))):
        return None
    first = next(known for known, letter in zip(string.ascii_uppercase, letters, strict=False) if known != letter)
    if any(re.search(rf"(?<![A-Za-z])[{first}-{letters[-1]}](?![A-Za-z])", text) for _, text in parted):
        return None
    said, text_said = _parted(gold.strip())
    right = [
        place
        for place, (letter, text) in enumerate(parted)
        if same(gold.strip(), text) or (said == letter and same(text_said, text))
    ]
    if len(right) != 1:
        return None
    closed = tuple(f"{letter}. {text}" for letter, (_, text) in zip(string.ascii_uppercase, parted, strict=False))
    return Closed(closed, string.ascii_uppercase[right[0]])


def _parted(option: str) -> tuple[str, str]:
    """The letter an option begins with ("" without one), and the text behind it."""
    found = OPTION.match(option)
    return (found[1], found[2].strip()) if found else ("", option)


def _last_of(count: int) -> str:
    """The last letter that so many options may have, some lost."""
    return string.ascii_uppercase[min(count + _LOST, len(string.ascii_uppercase)) - 1]

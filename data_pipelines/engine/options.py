"""The options of a question: their letters, the lines they stand in, and which of them a gold answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from data_pipelines.engine.fields import plain_number, unusable
from vlm_pg.answers.options import same_text
from vlm_pg.data.columns import Label
from vlm_pg.data.option_letters import is_gap, unglued

# "A. red", "A) red", "(A) red", "A: red"; not "D.C. is shown", unless the lines below say that it is an option.
_OPTION = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])(?:[.)]|:(?=\s)))(?![A-Za-z][.)])\s*(.*?)\s*")
_HEADING = re.compile(r"\s*(?:options|choices)\s*:?\s*", re.IGNORECASE)
_GOLD = re.compile(r"\(?([A-J])(?:[.):](?![A-Za-z][.)])|$)+\s*(.*)", re.DOTALL)


def lettered(texts: Sequence[str]) -> list[str]:
    """Options with their letters: lettered(["red", "blue"]) == ["A. red", "B. blue"].

    Raises:
        SampleError: ``bad_options``: more than there are letters.
    """
    return [f"{letter}. {text}" for letter, text in zip(_letters(len(texts)), texts, strict=True)]


def split_options(text: str, gap: bool = False) -> tuple[str, list[str]]:
    r"""The question, and the options that stand below it as lines, in their order; none where no line begins as one.

    split_options("Which?\nOptions:\nA. red\n(B) blue") == ("Which?", ["A. red", "B. blue"])

    Args:
        text: the question and its options.
        gap: whether a few letters may be lost, for callers who know what the answer means then (``close_gap``).

    Raises:
        SampleError: ``bad_options``: such lines are not the letters from A on, each once, other text follows, or a
            heading stands elsewhere than above them.
    """
    lines = text.strip().splitlines()
    found = [_OPTION.fullmatch(line) for line in lines]
    first = next((place for place, option in enumerate(found) if option), len(lines))
    options = [(option[1] or option[2], option[3]) for option in found[first:] if option]
    whole = len(options) == sum(1 for line in lines[first:] if line.strip())
    if options and (options[0][0] != "A" or not whole) and (glued := _glued(lines, first)):
        first, options = glued
        whole = True
    letters = [letter for letter, _ in options]
    asked = "\n".join(lines[:first]).rstrip().splitlines()
    if options and asked and _HEADING.fullmatch(asked[-1]):
        asked.pop()
    if any(_HEADING.fullmatch(line) for line in asked):
        raise unusable("bad_options", "no options stand below their heading", "'Options:', then a line for each,")
    written = [f"{letter}. {option}" for letter, option in options]
    if not whole or not (gap and is_gap(letters)):
        check_letters(written, whole)
    return "\n".join(asked).strip(), written


def check_letters(options: Sequence[str], whole: bool = True) -> None:
    """Refuse options, as ``split_options`` returns them, of which some are lost.

    Raises:
        SampleError: ``bad_options``.
    """
    letters = [option[0] for option in options]
    if not whole or len(options) == 1 or sorted(letters) != list(string.ascii_uppercase[: len(options)]):
        came = f"the lines of options begin with {', '.join(letters)}{'' if whole else ', and with no letter'}"
        raise unusable("bad_options", came, "Two or more as the last lines, each letter from A on once,")


def _glued(lines: Sequence[str], first: int) -> tuple[int, list[tuple[str, str]]] | None:
    """Where options begin, and those, if some of them run together with their letters: "A.U.S. Army".

    ``first``: the first line that surely is an option. The first of all is the question's.
    """
    places = (place for place in range(first, 0, -1) if lines[place].strip())
    found = ((place, unglued([line for line in lines[place:] if line.strip()])) for place in places)
    return next(((place, options) for place, options in found if options), None)


def letter_at(index: Any, count: int) -> str:
    """The letter of the option that a number from 0 on names, given as a number, as text, or by a class's number.

    Raises:
        SampleError: ``answer_not_in_options`` or ``bad_options``.
    """
    written = plain_number(index.number if isinstance(index, Label) else index).strip()
    if written not in map(str, range(count)):
        raise unusable(
            "answer_not_in_options", f"the answer is '{written[:80]}'", f"The number of an option, 0 to {count - 1},"
        )
    return _letters(count)[int(written)]


def letter_of_text(text: str, texts: Sequence[str]) -> str:
    """The letter of the one option that reads so, but for spaces.

    Raises:
        SampleError: ``answer_not_in_options``, ``ambiguous_answer`` where several read so, or ``bad_options``.
    """
    same = [place for place, option in enumerate(texts) if " ".join(option.split()) == " ".join(text.split())]
    if len(same) > 1:
        raise unusable("ambiguous_answer", f"{len(same)} options read '{text[:80]}'", "One right option")
    if not same:
        raise unusable("answer_not_in_options", f"the answer is '{text[:80]}'", f"One of {list(texts)}")
    return _letters(len(texts))[same[0]]


def letter_of(gold: str, options: Sequence[str]) -> str:
    """The letter of the option that a gold answer names by letter ("A", "A.", "(A)"), text, or both ("A. Black.").

    Args:
        gold: without tags.
        options: with their letters.

    Raises:
        SampleError: ``answer_not_in_options``, or ``ambiguous_answer``: letter and text, or several texts, disagree.
    """
    texts = dict(option.split(". ", 1) for option in options)
    by_text = {letter for letter, text in texts.items() if same_text(gold, text) or same_text(gold, f"{letter}.{text}")}
    letter, said = letter_and_text(gold)
    if letter in texts:
        by_letter = {letter} if not said or same_text(said, texts[letter]) else set()
        found = by_letter | by_text
        if said and not found:
            raise unusable("ambiguous_answer", f"the answer is '{gold[:80]}'", "A letter with the text of its option")
    else:
        found = by_text
    if len(found) > 1:
        raise unusable("ambiguous_answer", f"'{gold[:80]}' may be each of {', '.join(sorted(found))}", "One option")
    if not found:
        raise unusable("answer_not_in_options", f"the answer is '{gold[:80]}'", f"One of {list(options)}")
    return found.pop()


def letter_and_text(gold: str) -> tuple[str, str]:
    """Letter and text of an answer that begins with a letter, ("", "") for others: "A. Black." -> ("A", "Black.")."""
    labelled = _GOLD.fullmatch(gold.strip())
    return (labelled[1], labelled[2].strip()) if labelled else ("", "")


def _letters(count: int) -> str:
    if count > len(string.ascii_uppercase):
        raise unusable("bad_options", f"the question has {count} options", "26 at most, one for each letter,")
    return string.ascii_uppercase[:count]

"""Texts with places: how a protocol writes the words of a question.

{question}          the question, {options} one option a line, {subtitles} those at the frames that are shown
{details.KEY}       what the set publishes of the question under KEY
[[ ... ]]           left out where a place inside it is empty, or details lack its KEY
{{ and }}           a brace
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

PLACES = ("question", "options", "subtitles")
DETAILS = "details."
_MARKS = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{[^{}]*\}|[{}]")


@dataclass(frozen=True)
class Place:
    """Where something of the question is written; ``name`` as between its braces."""

    name: str


@dataclass(frozen=True)
class Optional:
    """A part that is left out where one of its places is empty."""

    parts: tuple[str | Place, ...]


@dataclass(frozen=True)
class Template:
    """A text with places, parsed."""

    parts: tuple[str | Place | Optional, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """The names of all places, in order."""
        flat = [one for part in self.parts for one in (part.parts if isinstance(part, Optional) else (part,))]
        return tuple(part.name for part in flat if isinstance(part, Place))

    def fill(self, value: Callable[[str, bool], str]) -> str:
        """The text; ``value(name, is_optional)`` gives what stands at a place, "" for nothing."""
        return "".join(_filled(part, value, False) for part in self.parts)


def _filled(part: str | Place | Optional, value: Callable[[str, bool], str], is_optional: bool) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Place):
        return value(part.name, is_optional)
    if any(isinstance(one, Place) and not value(one.name, True) for one in part.parts):
        return ""
    return "".join(_filled(one, value, True) for one in part.parts)


def parse(text: str) -> Template:
    """The template that ``text`` writes.

    Raises:
        ValueError: an unknown place (with the nearest known one), a lone brace, or double brackets that do not pair.
    """
    whole: list[str | Place | Optional] = []
    inner: list[str | Place] | None = None
    end = 0
    for mark in _MARKS.finditer(text):
        found = mark.group()
        current = whole if inner is None else inner
        current.append(text[end : mark.start()])
        end = mark.end()
        if found in ("{{", "}}"):
            current.append(found[0])
        elif found == "[[":
            if inner is not None:
                raise _unpaired(text, "another '[[' stands inside '[['")
            inner = []
        elif found == "]]":
            if inner is None:
                raise _unpaired(text, "']]' ends nothing")
            whole.append(Optional(tuple(part for part in inner if part != "")))
            inner = None
        elif len(found) == 1:
            raise ValueError(
                f"the template {_shown(text)} has a lone '{found}'. A place such as {{question}} is allowed. Write "
                f"'{found * 2}' for the brace itself."
            )
        else:
            current.append(_place(found[1:-1], text))
    if inner is not None:
        raise _unpaired(text, "'[[' is not ended")
    whole.append(text[end:])
    return Template(tuple(part for part in whole if part != ""))


def _place(name: str, text: str) -> Place:
    if name in PLACES or (name.startswith(DETAILS) and name != DETAILS):
        return Place(name)
    near = difflib.get_close_matches(name, PLACES, n=1, cutoff=0.5)
    advice = f"Did you mean {{{near[0]}}}?" if near else "Correct it, or write '{{' and '}}' for braces themselves."
    known = ", ".join(f"{{{one}}}" for one in PLACES)
    raise ValueError(
        f"the template {_shown(text)} names the place {{{name}}}. Places are {known} and {{details.KEY}}. {advice}"
    )


def _unpaired(text: str, what: str) -> ValueError:
    return ValueError(
        f"in the template {_shown(text)}, {what}. Parts that may be left out stand between '[[' and ']]', not within "
        "each other. Correct the brackets."
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")

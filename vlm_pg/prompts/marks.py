"""Where media stand in a prompt: at their marks in the question and its options, or before the words.

Only marks of the record count. A template or a subtitle that says "<image>" says just that, so the words of a prompt
carry the record's marks as placeholders until they are complete.
"""

from __future__ import annotations

import re

from vlm_pg.data.records import check_marks, mark_fault
from vlm_pg.prompts.turn import Medium, Turn
from vlm_pg.types import MEDIA_MARKS, MediaKind, Sample

_KINDS = {mark: kind for kind, mark in MEDIA_MARKS.items()}
_MARK = re.compile("|".join(_KINDS))
_LEADING = re.compile(rf"\s*(?:(?:{_MARK.pattern})\s*)+")
# Unpaired surrogates: no text of a record, a template or a subtitle file has one.
_PLACEHOLDERS: dict[str, MediaKind] = {chr(0xD800): "image", chr(0xD801): "video"}
_PLACEHOLDER = re.compile(f"([{''.join(_PLACEHOLDERS)}])")


def marked_question(question: str) -> str:
    """The question as it goes into a template: without the marks it begins with, and with placeholders for others.

    Media that a question begins with come before all words, those of the template too.
    """
    return marked(_LEADING.sub("", question, count=1) if _LEADING.match(question) else question)


def marked(text: str) -> str:
    """The text with placeholders for its marks."""
    for placeholder, kind in _PLACEHOLDERS.items():
        text = text.replace(MEDIA_MARKS[kind], placeholder)
    return text


def with_media(sample: Sample, words: str) -> str | Turn:
    """The user's turn: the words alone if all media come before them in their order, else media and words.

    Args:
        sample: the question.
        words: the complete ones, with placeholders.

    Raises:
        SampleError: ``media_mark_without_medium``: marks of a kind, in the record or in the words, are fewer or more
            than its media of that kind, and not none.
    """
    check_marks(sample)
    inner = [_PLACEHOLDERS[found] for found in _PLACEHOLDER.findall(words)]
    begins = _LEADING.match(sample.question)
    leading = [_KINDS[mark] for mark in _MARK.findall(begins[0])] if begins else []
    media = [Medium(ref.kind, index) for index, ref in enumerate(sample.media)]
    of_kind = {kind: [medium for medium in media if medium.kind == kind] for kind in MEDIA_MARKS}
    for kind in set(inner):
        marks = leading.count(kind) + inner.count(kind)
        if marks != len(of_kind[kind]):  # the template repeats or leaves out some of them
            raise mark_fault(kind, marks, len(of_kind[kind]), "the prompt")
    at_marks = [medium for kind, all_of in of_kind.items() for medium in all_of[len(all_of) - inner.count(kind) :]]
    before = [medium for medium in media if medium not in at_marks]
    following = {kind: iter(all_of) for kind, all_of in of_kind.items()}
    kinds = leading if len(leading) == len(before) else [medium.kind for medium in before]
    parts: list[str | Medium] = [next(following[kind]) for kind in kinds]
    if parts == media:
        return words
    for part in filter(None, _PLACEHOLDER.split(words)):
        parts.append(next(following[_PLACEHOLDERS[part]]) if part in _PLACEHOLDERS else part)
    return Turn(tuple(parts))

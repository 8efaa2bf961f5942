"""A user's turn in which media, or single frames of a video, stand between texts instead of before them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vlm_pg.data.records import check_marks, mark_fault
from vlm_pg.types import MEDIA_MARKS, DecodedMedia, MediaKind, Sample


@dataclass(frozen=True)
class Medium:
    """One of the sample's media: Medium("image", 1) is the second of them, an image."""

    kind: MediaKind
    index: int


@dataclass(frozen=True)
class Turn:
    """``parts``: texts and media in order; a number is that frame of the sample's one video, shown as an image.

    Turn(("Is ", Medium("image", 0), " the same as ", Medium("image", 1), "?"))
    Turn((0, "Mind the gap.\\n", 1, 2, "What is said?"))
    """

    parts: tuple[str | int | Medium, ...]

    @property
    def text(self) -> str:
        """The texts alone, one after the other."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def kinds(self) -> list[MediaKind]:
        """Of what is shown, in order of appearance."""
        shown = [part for part in self.parts if not isinstance(part, str)]
        return [part.kind if isinstance(part, Medium) else "image" for part in shown]

    @property
    def media_at(self) -> tuple[int, ...]:
        """See ``PromptWords``."""
        ends = accumulate(len(part) if isinstance(part, str) else 0 for part in self.parts)
        return tuple(end for end, part in zip(ends, self.parts, strict=True) if not isinstance(part, str))

    def shown(self, media: Sequence[DecodedMedia]) -> Sequence[DecodedMedia]:
        """The media, or the frames among the parts as images in their order.

        Raises:
            ValueError: frames are to be shown, and there is another medium beside the video, or none.
        """
        frames = [part for part in self.parts if isinstance(part, int)]
        if not frames:
            return media
        if [one.kind for one in media] != ["video"]:
            raise ValueError(f"frames of one video alternate with texts, and there are {len(media)} media")
        (video,) = media
        return [DecodedMedia("image", video.frames[i : i + 1], (0.0,), 0.0, video.decoder) for i in frames]


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


def subtitle_lines(media: Sequence[DecodedMedia]) -> str:
    """A heading, and a line for each text with the seconds it is shown, counted like the times of frames; "" for none.

        Subtitles:
        [12.5-14.0 seconds] Mind the gap.

    Where a question has several videos, the heading says whose they are ("Subtitles of video 2:").
    """
    videos = [item for item in media if item.kind == "video"]
    lines: list[str] = []
    for number, video in enumerate(videos, start=1):
        if video.subtitles:
            lines.append("Subtitles:" if len(videos) == 1 else f"Subtitles of video {number}:")
            lines += [f"[{cue.start:.1f}-{cue.end:.1f} seconds] {cue.text}" for cue in video.subtitles]
    return "\n".join(lines)

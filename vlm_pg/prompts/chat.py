"""A user's turn in which media, or single frames of a video, stand between texts instead of before them; and the
model's chat template: rendering it, and the tokens that only it and the processor may write."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from types import FrameType
from typing import Any

from vlm_pg.data.records import check_marks, mark_fault
from vlm_pg.errors import ModelError
from vlm_pg.types import CONTROL_TOKEN, MEDIA_MARKS, DecodedMedia, MediaKind, Sample


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


_DELIMITER = re.compile(r"<\|.+\|>")
# Lines, calls and returns of Python in one rendering. Qwen2-VL's template has some 200 for an image of a conversation,
# and 90,000 when it is compiled.
_MOST_EVENTS = 10_000_000


class _Endless(BaseException):
    """No ``Exception``: jinja2 drops those in some places, and a trace function that has raised is not called again."""


def render_chat(processor: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """A conversation as the model's chat template writes it.

    Args:
        options: as ``apply_chat_template`` takes them.

    Raises:
        ModelError: the template cannot be rendered. transformers renders it in jinja2's sandbox, which refuses private
            attributes and long ranges. Nested loops and macros that call themselves are stopped by a count of what
            Python runs, the same on every rank; one operation without end, such as a power of large numbers, is not.
    """
    events = count(1)

    def limit(frame: FrameType, event: str, argument: Any) -> Any:
        if next(events) > _MOST_EVENTS:
            raise _Endless
        return limit

    before = sys.gettrace()
    try:
        sys.settrace(limit)  # of this thread
        try:
            text = processor.apply_chat_template(messages, tokenize=False, **options)
        finally:
            sys.settrace(before)
    except _Endless:
        problem = f"loops: one conversation takes more than {_MOST_EVENTS:,} steps of Python"
        raise _unusable(processor, problem) from None
    except Exception as error:  # a template can raise anything
        raise _unusable(processor, f"cannot be rendered: {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise _unusable(processor, f"gives a {type(text).__name__} instead of a text")
    return text


def check_placeholders(processor: Any, text: str, kinds: Sequence[str]) -> None:
    """Raise ModelError if a rendered conversation does not have one placeholder for each of its media."""
    for kind in ("image", "video"):
        token = getattr(processor, f"{kind}_token", None)
        if token and text.count(token) != kinds.count(kind):
            what = f"writes {text.count(token)} times {token} for {kinds.count(kind)} {kind}s of a conversation"
            raise _unusable(processor, what)


def control_tokens(processor: Any) -> tuple[str, ...]:
    """Tokens that structure a conversation: media tokens, ends of texts, and special tokens the chat template writes.

    Added tokens that are none of these, such as those a model was taught, may stand in any text.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    named = {getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")}
    named |= {getattr(processor, f"{kind}_token", None) for kind in ("image", "video")}
    template = str(processor.chat_template)
    return tuple(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.content in named
        or CONTROL_TOKEN.fullmatch(token.content)
        or ((token.special or _DELIMITER.fullmatch(token.content)) and token.content in template)
    )


def _unusable(processor: Any, problem: str) -> ModelError:
    name = getattr(getattr(processor, "tokenizer", processor), "name_or_path", "")
    return ModelError(
        f"The chat template of the model {name or 'in memory'} {problem}. Copy chat_template.jinja (or "
        "chat_template in tokenizer_config.json) from the checkpoint the model comes from."
    )

"""A sample and its pixels to a ``Prompt``, through the model's own processor and chat template.

Shape letters: P prompt tokens, F frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch

from vlm_pg.errors import ModelError, SampleError
from vlm_pg.prompts.chat import (
    Turn,
    check_placeholders,
    control_tokens,
    marked,
    marked_question,
    render_chat,
    subtitle_lines,
    with_media,
)
from vlm_pg.prompts.processor_outputs import is_tokenizer, prompt_from_processor, without_pixels
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import DecodedMedia, MediaKind, Prompt, PromptWords, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from vlm_pg.media.decode_file import MediaFacts


PositionFn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[MediaKind, ...], tuple[float, ...]], torch.Tensor
]
# (sample, its decoded media) -> (system message or "", the words of the user's turn, subtitles included; a Turn where
# media or frames do not all come before the words)
Wording = Callable[[Sample, Sequence[DecodedMedia]], tuple[str, str | Turn]]


class PromptBuilder:
    """Builds prompts for one model. Those of the same decoded media, one after the other, have one tensor of pixels.

    Args:
        processor: the Hugging Face processor of a registered family, with a chat template; of a family that reads text
            alone, its tokenizer.
        settings: texts and the length limit.
        position_fn: ``(input_ids [P], mm_token_type_ids [P], grid_thw, media_kinds, second_per_grid_ts)`` to the
            multimodal positions, int64 [3, P]; ``second_per_grid_ts`` has one entry per video.
        previews: whether prompts get thumbnails of what the model sees.
        wording: replaces the settings' own texts; the settings still decide whether subtitles are read, and the length
            limit.
        answer_prefix: appended to the prompt, so that the model's answer begins with it.

    Raises:
        ModelError: the processor cannot handle chats (with media, unless it is a tokenizer).
    """

    def __init__(
        self,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        settings: PromptSettings,
        position_fn: PositionFn,
        previews: bool = True,
        wording: Wording | None = None,
        answer_prefix: str = "",
    ):
        self._reads_media = not is_tokenizer(processor)
        self._processor: Any = processor
        needed = ("tokenizer", "image_processor", "video_processor") if self._reads_media else ()
        lacking = [name for name in (*needed, "chat_template") if getattr(processor, name, None) is None]
        if lacking:
            kind = "processor of a Qwen-VL" if self._reads_media else "tokenizer of a Qwen"
            raise ModelError(
                f"The model's processor ({type(processor).__name__}) has no {' and no '.join(lacking)}. The {kind} "
                f"instruct checkpoint is needed. Add its {'preprocessor and ' if self._reads_media else ''}chat "
                "template files to the model folder."
            )
        self._without_pixels = without_pixels(processor)
        # Weak references to the last prompt and its media.
        self._last_media: tuple[ref[DecodedMedia], ...] = ()
        self._last_prompt: Callable[[], Prompt | None] = lambda: None
        self._settings = settings
        self._position_fn, self._previews = position_fn, previews
        self._wording, self._answer_prefix = wording, answer_prefix
        # Only Qwen2.5-VL's processor passes seconds on to the positions; the others write times into the text, or none.
        self._times_by_rate = "second_per_grid_ts" in self._processor.model_input_names
        self._control_tokens = control_tokens(self._processor)
        for text in (settings.system, *settings.instructions.values(), answer_prefix):
            if found := self._control_token_in(text):
                raise ModelError(
                    "prompt.system, prompt.instructions or an answer_prefix contains the model's control token "
                    f"'{found}'. Control tokens may come from the chat template only. Remove it."
                )

    def build(self, sample: Sample, media: Sequence[DecodedMedia]) -> Prompt:
        """The prompt of a sample.

        Args:
            sample: the question.
            media: the decoded media of the sample, in its order.

        Raises:
            SampleError: ``media_token_in_text`` or ``prompt_too_long``; as ``with_media``; what the wording raises.
            ModelError: the sample has media and the model reads text alone, or the chat template begins the answer with
                thinking and there is an ``answer_prefix``.
        """
        self._check_media(sample, media)
        subtitles = subtitle_lines(media) if self._settings.subtitles and self._wording is None else ""
        system, turn = (self._wording or settings_wording(self._settings))(sample, media)
        self._refuse_control_tokens(system)
        kinds, shown = [ref.kind for ref in sample.media], media
        if isinstance(turn, Turn):
            kinds, shown = turn.kinds, turn.shown(media)
            words = PromptWords(system, turn.text, self._answer_prefix, turn.media_at)
        else:
            words = PromptWords(system, turn, self._answer_prefix)
        self._refuse_control_tokens(words.user)
        content = user_content([{"type": kind} for kind in kinds], words, self._reads_media)
        first = [{"role": "system", "content": system}] if system else []
        return self._built(sample, [*first, {"role": "user", "content": content}], shown, media, subtitles, words)

    def build_conversation(
        self, sample: Sample, messages: Sequence[Mapping[str, Any]], media: Sequence[DecodedMedia]
    ) -> Prompt:
        """The prompt of a given conversation.

        Args:
            sample: whose id and media it has.
            messages: as chat templates take them: {"role": ..., "content": [{"type": "video"}, {"type": "text", "text":
                ...}]}, with a part for each of the sample's media, in order.
            media: decoded, in the same order.

        Raises:
            SampleError: ``media_token_in_text`` or ``prompt_too_long``.
            ModelError: there are media and the model reads text alone.
        """
        self._check_media(sample, media)
        parts = [part for message in messages for part in message["content"]]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        kinds = [part["type"] for part in parts if part["type"] != "text"]
        if kinds != [item.kind for item in media]:
            raise ValueError(f"the conversation of {sample.sample_id} shows {kinds}, but its media are {sample.media}")
        for text in texts:
            self._refuse_control_tokens(text)
        if not self._reads_media:
            messages = [{**one, "content": "".join(part["text"] for part in one["content"])} for one in messages]
        return self._built(sample, messages, media, media, "", PromptWords("", "".join(texts), self._answer_prefix))

    def _built(
        self,
        sample: Sample,
        messages: Sequence[Mapping[str, Any]],
        shown: Sequence[DecodedMedia],
        media: Sequence[DecodedMedia],
        subtitles: str,
        words: PromptWords,
    ) -> Prompt:
        """``shown``: ``media``, or the images made of them."""
        text = render_chat(self._processor, messages, add_generation_prompt=True)
        if self._answer_prefix and text.rstrip().endswith("<think>"):
            raise ModelError(
                f"An answer is to begin with {self._answer_prefix!r}, and the model's chat template begins it with "
                "<think>. Such a beginning is for models that answer at once. Choose a protocol without answer_prefix."
            )
        text += self._answer_prefix
        if self._reads_media:
            check_placeholders(self._processor, text, [item.kind for item in shown])

        def prompt_by(processor: Any) -> Prompt:
            inputs = self._process(processor, text, shown)
            tokens, visual = int(inputs["input_ids"].shape[1]), int((inputs["mm_token_type_ids"] != 0).sum())
            check_length(tokens, visual, subtitles, words, self._settings.max_prompt_tokens)
            preview, seconds = preview_frames(media) if self._previews else ((), ())
            texts: dict[str, Any] = {"text": text, "subtitles": subtitles, "words": words}
            previews = {"preview": preview, "preview_seconds": seconds}
            return prompt_from_processor(inputs, self._position_fn, sample.sample_id, **texts, **previews)

        if not media:
            return prompt_by(self._processor)
        same_media = list(map(id, media)) == [id(one()) for one in self._last_media]
        before = self._last_prompt() if same_media else None
        prompt = None if before is None else prompt_by(self._without_pixels)
        # Other kinds: the same media in another order. Other grids: a processor that cuts frames in an unforeseen way.
        if before is None or prompt is None or _layout(before) != _layout(prompt):
            prompt = prompt_by(self._processor)
        else:
            keys = {"content_key": before.content_key, "media_keys": before.media_keys}
            prompt = replace(prompt, pixel_values=before.pixel_values, **keys)  # type: ignore[arg-type]
        self._last_media, self._last_prompt = tuple(map(ref, media)), ref(prompt)
        return prompt

    @property
    def reads_subtitles(self) -> bool:
        """Whether subtitles become part of prompts."""
        return self._settings.subtitles

    def question_text(self, sample: Sample) -> str:
        """``question_words`` of this builder's settings."""
        return question_words(self._settings, sample)

    def _process(self, processor: Any, text: str, media: Sequence[DecodedMedia]) -> dict[str, Any]:
        """The processor's outputs for one conversation; frames go in as they are, already sampled and resized."""
        if not self._reads_media:
            # The chat template has placed all special tokens there are.
            ids = processor(text=[text], return_tensors="pt", add_special_tokens=False)["input_ids"]
            return {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}
        images = [torch.from_numpy(item.frames[0]) for item in media if item.kind == "image"]
        videos = [item for item in media if item.kind == "video"]
        media_arguments: dict[str, Any] = {}
        if images:
            media_arguments |= {"images": images, "images_kwargs": {"do_resize": False}}
        if videos:
            media_arguments |= {
                "videos": [torch.from_numpy(item.frames) for item in videos],
                "videos_kwargs": {
                    "do_resize": False,
                    "do_sample_frames": False,
                    "video_metadata": [_metadata(item, self._times_by_rate) for item in videos],
                },
            }
        outputs = dict(processor(text=[text], return_tensors="pt", **media_arguments))
        # as a tensor, then as numbers: the float32 rounding of transformers' own path decides positions at the margin
        seconds = torch.as_tensor(outputs.get("second_per_grid_ts", ()), dtype=torch.float32)
        return outputs | {"second_per_grid_ts": seconds.tolist()}

    def _check_media(self, sample: Sample, media: Sequence[DecodedMedia]) -> None:
        if sample.media and not self._reads_media:
            raise ModelError(
                f"Sample {sample.sample_id!r} has {len(sample.media)} image(s) or video(s), but the model "
                f"{getattr(self._processor, 'name_or_path', '') or 'in memory'} reads text alone. Use a Qwen-VL "
                "checkpoint, or records without media."
            )
        kinds = tuple(item.kind for item in media)
        if kinds != tuple(ref.kind for ref in sample.media):
            raise ValueError(f"sample {sample.sample_id} has media {sample.media}, but {kinds} were handed in")

    def _control_token_in(self, words: str) -> str | None:
        return next((token for token in self._control_tokens if token in words), None)

    def _refuse_control_tokens(self, words: str) -> None:
        if token := self._control_token_in(words):
            raise SampleError(
                "media_token_in_text",
                f"the text of the question contains the model's control token '{token}'. Control tokens may come "
                "from the chat template only. Remove it from the record, or from its subtitles.",
            )


def _layout(prompt: Prompt) -> tuple[Any, Any]:
    return prompt.media_kinds, None if prompt.grid_thw is None else prompt.grid_thw.tolist()


def check_length(tokens: int, visual: int, subtitles: str, words: PromptWords, limit: int) -> None:
    """Raise SampleError (``prompt_too_long``) for more than ``limit`` tokens; ``visual``: those of media."""
    if tokens <= limit:
        return
    if visual > tokens // 2:
        change = "Lower media.max_frames, media.max_pixels or media.video_tokens"
    else:
        is_mostly_subtitles = len(subtitles) > len(words.user) // 2
        change = "Set prompt.subtitles=false" if is_mostly_subtitles else "Shorten the question"
    raise SampleError(
        "prompt_too_long",
        f"the prompt has {tokens} tokens, {visual} of them visual. At most {limit} are allowed, and prompts are "
        f"never cut. {change}, or raise prompt.max_prompt_tokens.",
    )


def question_words(settings: PromptSettings, sample: Sample) -> str:
    """The settings' words of the user's turn: question, options on lines of their own, instruction of the kind
    (without a gold answer none).

    They are as ``with_media`` takes them.
    """
    options = map(marked, sample.options)
    # A question without a gold answer, as of a conversation, says itself how to respond.
    instruction = settings.instructions[sample.answer_kind] if sample.answer else ""
    parts = (marked_question(sample.question), *options, instruction)
    return "\n".join(part for part in parts if part)


def settings_wording(settings: PromptSettings) -> Wording:
    """The wording of a builder without one; it takes no processor."""

    def wording(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, str | Turn]:
        subtitles = subtitle_lines(media) if settings.subtitles else ""
        # First, so that questions on one video share them too.
        text = "\n".join(filter(None, (subtitles, question_words(settings, sample))))
        return settings.system, with_media(sample, text)

    return wording


def user_content(media: Sequence[dict[str, Any]], words: PromptWords, reads_media: bool) -> list[dict[str, Any]] | str:
    """The content of a user's turn as chat templates take it: those of text models know words alone, no parts."""
    if not reads_media:
        return words.user
    if not words.media_at:
        return [*media, {"type": "text", "text": words.user}]
    parts: list[dict[str, Any]] = []
    ends = (*words.media_at, len(words.user))
    for index, (start, end) in enumerate(pairwise((0, *ends))):
        parts += [{"type": "text", "text": words.user[start:end]}] if start < end else []
        parts += media[index : index + 1]
    return parts


def _metadata(video: DecodedMedia, by_rate: bool) -> Any:
    """Tells the processor when the frames it gets were shown.

    Args:
        by_rate: the processor derives seconds per temporal patch from the frame rate (Qwen2.5-VL). Otherwise it takes
            frame index / rate of every frame for its time and writes it into the text (Qwen3-VL and later): at rate 1
            the index is the frame's own time in seconds, exact whatever the sampling.
    """
    from transformers.video_utils import VideoMetadata

    count = len(video.frames)
    indices: list[Any] = list(range(count)) if by_rate else list(video.frame_seconds)
    return VideoMetadata(
        total_num_frames=count,
        fps=video.sampled_fps if by_rate else 1.0,
        height=video.frames.shape[2],
        width=video.frames.shape[3],
        duration=count / video.sampled_fps,
        video_backend=video.decoder,
        frames_indices=indices,
    )


class PromptMeasure:
    """Prompts of one model as long as ``PromptBuilder``'s, with their positions, whose pixels are missing.

    Args:
        processor, settings, position_fn, wording, answer_prefix: as of ``PromptBuilder``.
    """

    def __init__(
        self,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        settings: PromptSettings,
        position_fn: PositionFn,
        wording: Wording | None = None,
        answer_prefix: str = "",
    ):
        unlimited = settings.model_copy(update={"max_prompt_tokens": sys.maxsize})
        counting = without_pixels(processor)
        self._builder = PromptBuilder(counting, unlimited, position_fn, False, wording, answer_prefix)
        self._limit = settings.max_prompt_tokens

    def measure(self, sample: Sample, facts: Sequence[MediaFacts]) -> Prompt:
        """The prompt of a sample, however long; ``pixel_values`` [patches, 0], and so keys that mean nothing.

        Args:
            sample: the question.
            facts: of its media, in its order.

        Raises:
            SampleError: ``media_token_in_text``; what the wording raises.
            ModelError: the sample has media and the model reads text alone.
        """
        media = [stand_in(ref.kind, one) for ref, one in zip(sample.media, facts, strict=True)]
        return self._builder.build(sample, media)

    def check(self, prompt: Prompt) -> None:
        """Raise the SampleError ``prompt_too_long`` that building the prompt of ``measure`` would raise."""
        assert prompt.words is not None  # the builder's
        check_length(prompt.num_tokens, prompt.num_visual_tokens, prompt.subtitles, prompt.words, self._limit)


def stand_in(kind: MediaKind, facts: MediaFacts) -> DecodedMedia:
    """A medium of that size whose frames uint8 [F, 3, height, width] are views of one byte."""
    shape = (facts.frames, 3, facts.height, facts.width)
    frames = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, (0, 0, 0, 0))
    return DecodedMedia(kind, frames, facts.frame_seconds, facts.sampled_fps, "none", facts.subtitles)


MAX_THUMBNAILS = 8
LONGEST_SIDE = 128


def preview_frames(media: Sequence[DecodedMedia]) -> tuple[tuple[np.ndarray, ...], tuple[float, ...]]:
    """Up to eight frames, spread evenly over all media in order, and their times in seconds.

    Returns:
        Thumbnails uint8 [height, width, 3] with no side above 128 pixels, and one time for each.
    """
    from PIL import Image

    frames = [(frame, second) for item in media for frame, second in zip(item.frames, item.frame_seconds, strict=True)]
    count = min(len(frames), MAX_THUMBNAILS)
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int) if count else ()
    picked = [frames[index] for index in chosen]
    thumbnails = []
    for frame, _ in picked:
        image = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0)))
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BICUBIC)  # never scaled up
        thumbnails.append(np.asarray(image))
    return tuple(thumbnails), tuple(second for _, second in picked)

"""How long prompts become, exactly and without a pixel: from what a probe says of their media.

The model's own processor writes the text and counts the tokens; only its parts that make pixels are replaced, by ones
that say which grids they would make.

Shape letters: F frames.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlm_pg.media.probe import MediaFacts
from vlm_pg.prompts.builder import PositionFn, PromptBuilder, Wording, check_length, is_mostly, is_tokenizer
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import DecodedMedia, MediaKind, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


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
        self._builder = PromptBuilder(
            without_pixels(processor),
            unlimited,
            position_fn,
            previews=False,
            wording=wording,
            answer_prefix=answer_prefix,
        )
        self._limit = settings.max_prompt_tokens

    @property
    def reads_subtitles(self) -> bool:
        """See ``PromptBuilder``."""
        return self._builder.reads_subtitles

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
        mostly_subtitles = is_mostly(prompt.subtitles, prompt.words.user)
        check_length(prompt.num_tokens, prompt.num_visual_tokens, mostly_subtitles, self._limit)


def stand_in(kind: MediaKind, facts: MediaFacts) -> DecodedMedia:
    """A medium of that size whose frames uint8 [F, 3, height, width] are one byte, shown everywhere."""
    shape = (facts.frames, 3, facts.height, facts.width)
    frames = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, (0, 0, 0, 0))
    return DecodedMedia(kind, frames, facts.frame_seconds, facts.sampled_fps, "none", facts.subtitles)


def without_pixels(processor: Any) -> Any:
    """The processor, but that its ``pixel_values`` have no columns; of a text model it is the same."""
    if is_tokenizer(processor):
        return processor
    counting = copy.copy(processor)
    counting.image_processor = _GridsAlone(processor.image_processor, "pixel_values", "image_grid_thw")
    counting.video_processor = _GridsAlone(processor.video_processor, "pixel_values_videos", "video_grid_thw")
    return counting


class _GridsAlone:
    """In the place of a processor of images or videos that are resized already; everything but calling it is that
    one's."""

    def __init__(self, inner: Any, pixels: str, grids: str):
        self._inner, self._pixels, self._grids = inner, pixels, grids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, media: Sequence[torch.Tensor], **arguments: Any) -> dict[str, Any]:
        """Of images [3, height, width] or videos [F, 3, height, width] the grids, as time, height, width in patches."""
        if arguments.get("do_resize") is not False:
            raise ValueError("only media that are resized already have known grids; pass do_resize=False")
        side, frames = self._inner.patch_size, self._inner.temporal_patch_size
        grids = [
            (-(-len(one) // frames) if one.dim() == 4 else 1, one.shape[-2] // side, one.shape[-1] // side)
            for one in media
        ]
        grid_thw = torch.tensor(grids, dtype=torch.int64)
        outputs = {self._pixels: torch.empty(int(grid_thw.prod(-1).sum()), 0), self._grids: grid_thw}
        metadata = arguments.get("video_metadata")
        return outputs if metadata is None else {**outputs, "video_metadata": metadata}

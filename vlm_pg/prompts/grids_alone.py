"""A processor that says which grids media would make, and makes no pixels: for lengths, and where pixels are there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch


def is_tokenizer(processor: Any) -> bool:
    """Whether a model's processor is its tokenizer, which is so for models that read text alone."""
    from transformers import PreTrainedTokenizerBase

    return isinstance(processor, PreTrainedTokenizerBase)


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

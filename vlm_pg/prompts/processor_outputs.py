"""Prompts from the outputs of a Hugging Face processor, for users who build their own."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vlm_pg.types import MediaKind, Prompt


def prompt_from_processor(
    inputs: Mapping[str, Any], position_fn: Callable[..., torch.Tensor], sample_id: str = "", **extra: Any
) -> Prompt:
    """One Prompt from the processor's outputs for one conversation, media in order of appearance.

    Args:
        inputs: input_ids [1, P], mm_token_type_ids [1, P], and for media pixel_values(_videos) with image_grid_thw,
            video_grid_thw and second_per_grid_ts.
        position_fn: (input_ids, mm_token_type_ids, grid_thw, media_kinds, second_per_grid_ts) -> int64 [3, P].

    Raises:
        ValueError: more than one sequence, no token types, or ids and media that do not belong together.
    """
    input_ids = torch.as_tensor(inputs["input_ids"]).cpu()
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"Got input_ids of shape {tuple(input_ids.shape)}; a prompt is one conversation, [1, tokens]. "
            "Call the processor once per conversation."
        )
    if inputs.get("mm_token_type_ids") is None:
        raise ValueError(
            "The processor's outputs lack mm_token_type_ids; call it with return_mm_token_type_ids=True. With a text "
            "model's tokenizer, which knows no such thing, give zeros like input_ids."
        )
    types = torch.as_tensor(inputs["mm_token_type_ids"])[0].long().cpu()
    pixels, grids, kinds = _in_order_of_appearance(inputs, types)
    given = inputs.get("second_per_grid_ts")  # a list or a tensor, one entry per video
    seconds = () if given is None else tuple(float(s) for s in given)
    grid_thw = torch.stack(grids) if grids else None
    pixel_values = torch.cat(pixels) if pixels else None
    keys = media_keys(pixel_values, grid_thw)
    ids = input_ids[0].long()
    response_start = None
    if types[-1] != 0:
        # The position of the first response token, from the rule itself: with one token of text behind the prompt.
        following = (torch.nn.functional.pad(row, (0, 1)) for row in (ids, types))
        response_start = int(position_fn(*following, grid_thw, kinds, seconds)[0, -1])
    return Prompt(
        sample_id=sample_id,
        input_ids=ids,
        mm_token_type_ids=types,
        positions_3P=position_fn(ids, types, grid_thw, kinds, seconds),
        response_start=response_start,
        pixel_values=pixel_values,
        grid_thw=grid_thw,
        media_kinds=kinds,
        content_key=_join_keys(keys),
        media_keys=keys,
        **extra,
    )


def content_key(pixel_values: torch.Tensor | None, grid_thw: torch.Tensor | None) -> str:
    """Hash of pixels and grids; "" without media."""
    return _join_keys(media_keys(pixel_values, grid_thw))


def media_keys(pixel_values: torch.Tensor | None, grid_thw: torch.Tensor | None) -> tuple[str, ...]:
    """One hash per row of ``grid_thw`` [media, 3], of that item's pixels and grid."""
    if pixel_values is None or grid_thw is None:
        return ()
    keys = []
    for pixels, grid in zip(pixel_values.split(grid_thw.prod(-1).tolist()), grid_thw, strict=True):
        digest = hashlib.sha256(grid.contiguous().numpy().tobytes())
        digest.update(pixels.contiguous().numpy().tobytes())
        keys.append(digest.hexdigest())
    return tuple(keys)


def _join_keys(keys: tuple[str, ...]) -> str:
    return hashlib.sha256("".join(keys).encode()).hexdigest() if keys else ""


def _in_order_of_appearance(
    inputs: Mapping[str, Any], types: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[MediaKind, ...]]:
    """Pixels and grids of each medium.

    Counted along the visual tokens alone: a run of one token type may hold several media (no text between them), and
    one video may be cut into several runs (Qwen3-VL writes the time in words before every temporal patch).
    """
    queues: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {1: [], 2: []}
    for code, pixel_name, grid_name in (
        (1, "pixel_values", "image_grid_thw"),
        (2, "pixel_values_videos", "video_grid_thw"),
    ):
        if inputs.get(pixel_name) is not None:
            grid = torch.as_tensor(inputs[grid_name]).cpu()
            pixels = torch.as_tensor(inputs[pixel_name]).cpu().float().split(grid.prod(-1).tolist())
            queues[code] = list(zip(pixels, grid, strict=True))
    ordered: list[tuple[torch.Tensor, torch.Tensor, MediaKind]] = []
    visual = types[types != 0].tolist()
    patches = sum(int(grid.prod()) for queue in queues.values() for _, grid in queue)
    merged = patches // max(1, len(visual))
    if patches != merged * len(visual):
        raise ValueError(
            f"The ids have {len(visual)} media tokens for {patches} patches, not a whole number of patches each. Give "
            "ids and pixels of one processor call, without truncation."
        )
    index = 0
    while queues[1] or queues[2]:
        if index >= len(visual) or not queues[visual[index]]:
            raise ValueError(
                "Media tokens and media do not match in kind or number. Give ids and pixels of one processor call, "
                "without truncation."
            )
        pixels, grid = queues[visual[index]].pop(0)
        ordered.append((pixels, grid, "image" if visual[index] == 1 else "video"))
        index += int(grid.prod()) // merged
    return [p for p, _, _ in ordered], [g for _, g, _ in ordered], tuple(k for _, _, k in ordered)


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
    """Stands in for a processor of images or videos that are resized already; other attributes are that one's."""

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

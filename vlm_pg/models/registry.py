"""Every model-specific fact in one place: a new family is an entry here, plus tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.errors import ModelError
from vlm_pg.types import MediaKind

_MEDIA_TOKEN_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_MEDIA_TOKEN_NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>")


def _vision_tower(model: Any) -> torch.nn.Module:
    return model.model.visual


def _language_model(model: Any) -> torch.nn.Module:
    return model.model.language_model


def _encode(model: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    tower = model.model.visual
    return tower(pixel_values.to(tower.dtype), grid_thw=grid_thw).pooler_output


def _encode_deepstack(model: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    """[M, 1 + early layers, D]: what goes into the embeddings, then what is added after each early decoder layer."""
    tower = model.model.visual
    output = tower(pixel_values.to(tower.dtype), grid_thw=grid_thw)
    return torch.stack([output.pooler_output, *output.deepstack_features], dim=1)


def _positions(
    model: Any,
    input_ids: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    grid_thw: torch.Tensor | None,
    media_kinds: tuple[MediaKind, ...],
    second_per_grid_ts: tuple[float, ...],
) -> torch.Tensor:
    if grid_thw is None:
        return torch.arange(input_ids.shape[0]).expand(3, -1).clone()
    grids: dict[MediaKind, list[torch.Tensor]] = {"image": [], "video": []}
    for kind, grid in zip(media_kinds, grid_thw, strict=True):
        grids[kind].append(grid)
    # Only Qwen2.5-VL reads seconds; the processors of the other families hand over none.
    seconds = {"second_per_grid_ts": list(second_per_grid_ts)} if second_per_grid_ts else {}
    positions, _ = model.model.get_rope_index(
        input_ids[None],
        mm_token_type_ids[None],
        image_grid_thw=torch.stack(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.stack(grids["video"]) if grids["video"] else None,
        **seconds,
    )
    return positions[:, 0]


@dataclass(frozen=True)
class Family:
    """How to reach the parts of one transformers model family, and what is special about it.

    ``vision_tower(model)``, ``language_model(model)``: the two parts as modules.
    ``encode_vision(model, pixel_values [patches, dim], grid_thw [media, 3])``: one call of the tower, images and
    videos alike, -> [M, D]. With ``deepstack`` it returns [M, 1 + E, D]: [:, 0] goes into the embeddings, [:, 1 + i]
    is added to the output of decoder layer i at the media tokens (https://arxiv.org/abs/2406.04334).
    ``rope_positions(model, input_ids [P], mm_token_type_ids [P], grid_thw, media_kinds, second_per_grid_ts) ->
    int64 [3, P]``: transformers' own positions.
    ``moe``: feed-forward layers are mixtures of experts. ``linear_attention``: some layers keep a recurrent state
    instead of keys and values (``layer_types`` of the text config says which).
    ``media_token_fields``, ``media_token_names``: config fields and names of tokens only the processor may place.
    """

    model_type: str
    class_name: str
    deepstack: bool = False
    moe: bool = False
    linear_attention: bool = False
    vision_tower: Callable[[Any], torch.nn.Module] = _vision_tower
    language_model: Callable[[Any], torch.nn.Module] = _language_model
    encode_vision: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = _encode
    rope_positions: Callable[..., torch.Tensor] = _positions
    media_token_fields: tuple[str, ...] = _MEDIA_TOKEN_FIELDS
    media_token_names: tuple[str, ...] = _MEDIA_TOKEN_NAMES

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who trains this family should be told once, at the start of a run."""
        if not self.moe:
            return ()
        return (
            "mixture of experts: the auxiliary balancing loss is off (it depends on how often a prefix is repeated)",
        )


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        Family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        Family("qwen3_vl", "Qwen3VLForConditionalGeneration", deepstack=True, encode_vision=_encode_deepstack),
        Family(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            deepstack=True,
            moe=True,
            encode_vision=_encode_deepstack,
        ),
        Family("qwen3_5", "Qwen3_5ForConditionalGeneration", linear_attention=True),
        Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", moe=True, linear_attention=True),
    )
}


def family_of(config: Any) -> Family:
    """The registered family of a transformers config.

    Raises:
        ModelError: the family is not registered, or the configuration cannot be shared exactly.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"Model type {config.model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}. "
            "Use a checkpoint of one of these, or register the family in vlm_pg/models/registry.py."
        )
    text = config.get_text_config()
    if getattr(text, "attention_dropout", 0.0):
        raise ModelError(
            f"The model has attention_dropout={text.attention_dropout}; sharing a prefix is exact only at 0. "
            "Set it to 0 in the model's config.json."
        )
    _check_layer_types(family, getattr(text, "layer_types", None) or ())
    return family


def _check_layer_types(family: Family, layer_types: tuple[str, ...] | list[str]) -> None:
    if "sliding_attention" in layer_types:
        raise ModelError(
            "The model uses sliding-window attention layers (sliding_attention in layer_types); only full attention is "
            "supported. Set use_sliding_window to false in the model's config.json, and take sliding_attention out of "
            "layer_types if it stands there."
        )
    allowed = ("full_attention", "linear_attention") if family.linear_attention else ("full_attention",)
    if unknown := sorted(set(layer_types) - set(allowed)):
        raise ModelError(
            f"The model's config has layer_types {', '.join(unknown)}; for {family.model_type} allowed are "
            f"{', '.join(allowed)}. Use a checkpoint with these layers only."
        )

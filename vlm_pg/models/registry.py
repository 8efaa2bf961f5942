"""Every model-specific fact in one place: a new family is an entry here, plus tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NoReturn

import torch

from vlm_pg.errors import ModelError
from vlm_pg.models.positions import MergedGrid, grid_times, one_per_grid, qwen_positions
from vlm_pg.models.settings import PositionRule
from vlm_pg.types import MediaKind

_MEDIA_TOKEN_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_MEDIA_TOKEN_NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>")

_UNCUT_SECONDS_FROM = (5, 18)


def _vision_tower(model: Any) -> torch.nn.Module:
    return model.model.visual


def _no_tower(model: Any) -> None:
    return None


def _language_model(model: Any) -> torch.nn.Module:
    return model.model.language_model


def _decoder_alone(model: Any) -> torch.nn.Module:
    return model.model


def _encode(model: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    tower = model.model.visual
    return tower(pixel_values.to(tower.dtype), grid_thw=grid_thw).pooler_output


def _encode_deepstack(model: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
    """[M, 1 + early layers, D]: what goes into the embeddings, then what is added after each early decoder layer."""
    tower = model.model.visual
    output = tower(pixel_values.to(tower.dtype), grid_thw=grid_thw)
    return torch.stack([output.pooler_output, *output.deepstack_features], dim=1)


def refuse_media(model: Any, what: str) -> NoReturn:
    """Raise ModelError for media that a model without a vision tower would be shown; ``what`` has them."""
    raise ModelError(
        f"{what}, but the model {model.name_or_path or 'in memory'} ({model.config.model_type}) has no vision tower "
        "and reads text alone. Use a Qwen-VL checkpoint, or leave the media out."
    )


def _refuse_to_encode(model: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> NoReturn:
    refuse_media(model, f"Got {len(grid_thw)} image(s) or video(s) to encode")


def _transformers_positions(
    model: Any,
    input_ids: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    grid_thw: torch.Tensor | None,
    media_kinds: tuple[MediaKind, ...],
    second_per_grid_ts: tuple[float, ...],
) -> torch.Tensor:
    if grid_thw is None:
        return torch.arange(input_ids.shape[0]).expand(3, -1).clone()
    _refuse_cut_seconds(second_per_grid_ts)
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


def _refuse_cut_seconds(second_per_grid_ts: tuple[float, ...]) -> None:
    """transformers before 5.18 cuts seconds per temporal grid to whole ones: at 4 frames a second time stands still."""
    cut = [seconds for seconds in second_per_grid_ts if seconds != int(seconds)]
    installed = version("transformers")
    if cut and tuple(int(part) for part in installed.split(".")[:2]) < _UNCUT_SECONDS_FROM:
        raise ModelError(
            f"model.positions is transformers, a video has {cut[0]:g} seconds per temporal patch, and transformers "
            f"{installed} cuts that to {int(cut[0])}. Set model.positions=qwen, install transformers 5.18 or later, or "
            "sample frames so that a temporal patch (two frames) takes whole seconds."
        )


def _qwen_positions(
    family: Family,
    model: Any,
    mm_token_type_ids: torch.Tensor,
    grid_thw: torch.Tensor | None,
    media_kinds: tuple[MediaKind, ...],
    second_per_grid_ts: tuple[float, ...],
) -> torch.Tensor:
    vision = model.config.vision_config
    per_second = vision.tokens_per_second if family.video_time == "seconds" else None
    videos = media_kinds.count("video")
    if second_per_grid_ts and len(second_per_grid_ts) != videos:
        raise ValueError(
            f"Got second_per_grid_ts for {len(second_per_grid_ts)} videos, but the prompt has {videos}; give one entry "
            "per video, or none."
        )
    # Without seconds a temporal grid lasts one, as in Qwen's code.
    seconds = iter(second_per_grid_ts or (1.0,) * videos)
    media = []
    for kind, grid in zip(media_kinds, () if grid_thw is None else grid_thw.tolist(), strict=True):
        times, rows, columns = grid[0], grid[1] // vision.spatial_merge_size, grid[2] // vision.spatial_merge_size
        clock = grid_times(times, per_second, next(seconds)) if kind == "video" else grid_times(times)
        media.append(MergedGrid(kind, clock, rows, columns))
    return qwen_positions(mm_token_type_ids, one_per_grid(media) if family.video_time == "text" else media)


@dataclass(frozen=True)
class Family:
    """How to reach the parts of one transformers model family, and what is special about it.

    ``reads_media``: there is a vision tower. Without one a prompt is text, and the processor is a tokenizer.
    ``vision_tower(model)``, ``language_model(model)``: the two parts as modules; the first None without a tower.
    ``rotary_axes``: how many of the three positions of a token (time, height, width) the language model takes; where it
    takes one, the three are equal.
    ``encode_vision(model, pixel_values [patches, dim], grid_thw [media, 3])``: one call of the tower, images and
    videos alike, -> [M, D]. With ``deepstack`` it returns [M, 1 + E, D]: [:, 0] goes into the embeddings, [:, 1 + i]
    is added to the output of decoder layer i at the media tokens (https://arxiv.org/abs/2406.04334).
    ``video_time``: what tells a video's temporal grids apart: one time position each ("grids"), as many as seconds pass
    ("seconds"), or words between them ("text": each grid is then a medium of its own).
    ``moe``: feed-forward layers are mixtures of experts. ``linear_attention``: some layers keep a recurrent state
    instead of keys and values (``layer_types`` of the text config says which).
    ``media_token_fields``, ``media_token_names``: config fields and names of tokens only the processor may place.
    """

    model_type: str
    class_name: str
    deepstack: bool = False
    moe: bool = False
    linear_attention: bool = False
    reads_media: bool = True
    rotary_axes: Literal[1, 3] = 3
    vision_tower: Callable[[Any], torch.nn.Module | None] = _vision_tower
    language_model: Callable[[Any], torch.nn.Module] = _language_model
    encode_vision: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = _encode
    video_time: Literal["grids", "seconds", "text"] = "text"
    media_token_fields: tuple[str, ...] = _MEDIA_TOKEN_FIELDS
    media_token_names: tuple[str, ...] = _MEDIA_TOKEN_NAMES

    def positions(
        self,
        rule: PositionRule,
        model: Any,
        input_ids: torch.Tensor,
        mm_token_type_ids: torch.Tensor,
        grid_thw: torch.Tensor | None,
        media_kinds: tuple[MediaKind, ...],
        second_per_grid_ts: tuple[float, ...],
    ) -> torch.Tensor:
        """Rotary positions int64 [3, P] of a prompt.

        Args:
            rule: "qwen" (``vlm_pg/models/positions.py``) or "transformers" (the installed release's own).
            model: the transformers model.
            input_ids, mm_token_type_ids: int64 [P].
            grid_thw: int64 [media, 3] before merging, or None.
            second_per_grid_ts: one entry per video, or none.

        Raises:
            ModelError: the installed transformers computes its own rule wrongly for these seconds, or media were given
                to a model that reads text alone.
            ValueError: token types and grids do not belong together.
        """
        if not self.reads_media:
            if media_kinds or bool(mm_token_type_ids.any()):
                refuse_media(model, "The prompt has images or videos")
            return torch.arange(input_ids.shape[0]).expand(3, -1).clone()
        if rule == "transformers":
            given = (input_ids, mm_token_type_ids, grid_thw, media_kinds, second_per_grid_ts)
            return _transformers_positions(model, *given)
        return _qwen_positions(self, model, mm_token_type_ids, grid_thw, media_kinds, second_per_grid_ts)

    def describe_positions(self, rule: PositionRule) -> str:
        """The rule in a line, and what it means for whoever serves the weights later."""
        if not self.reads_media:
            return f"token by token ({self.model_type} reads text alone, for which all rules are one)"
        if self.video_time == "text":
            return f"{rule} (for {self.model_type} both rules are one: words tell a video's time)"
        if rule == "qwen":
            return (
                "qwen (what follows a medium starts past its largest position of any axis, as in vLLM and SGLang; "
                "transformers 5 leaves out a video's time)"
            )
        return (
            f"transformers (as {version('transformers')} counts, a video's time left out; vLLM and SGLang would serve "
            "long videos at other positions)"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who trains this family should be told once, at the start of a run."""
        if not self.moe:
            return ()
        return (
            "mixture of experts: the auxiliary balancing loss is off (it depends on how often a prefix is repeated)",
        )


def _text_family(model_type: str, class_name: str, **special: Any) -> Family:
    """A language model by itself: no tower, no token that only a processor may place."""
    return Family(
        model_type,
        class_name,
        reads_media=False,
        vision_tower=_no_tower,
        language_model=_decoder_alone,
        encode_vision=_refuse_to_encode,
        media_token_fields=(),
        media_token_names=(),
        **special,
    )


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_vl", "Qwen2VLForConditionalGeneration", video_time="grids"),
        Family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", video_time="seconds"),
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
        _text_family("qwen2", "Qwen2ForCausalLM", rotary_axes=1),
        _text_family("qwen3", "Qwen3ForCausalLM", rotary_axes=1),
        _text_family("qwen3_moe", "Qwen3MoeForCausalLM", rotary_axes=1, moe=True),
        # The language model of Qwen3.5 by itself takes three axes still.
        _text_family("qwen3_5_text", "Qwen3_5ForCausalLM", linear_attention=True),
        _text_family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", moe=True, linear_attention=True),
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
    layer_types = getattr(text, "layer_types", None) or ()
    # A config without a list of layer types (Qwen3-MoE) has the window in all of them.
    windowed = not layer_types and getattr(text, "sliding_window", None) is not None
    _check_layer_types(family, layer_types, windowed)
    return family


def _check_layer_types(family: Family, layer_types: tuple[str, ...] | list[str], windowed: bool) -> None:
    if windowed or "sliding_attention" in layer_types:
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

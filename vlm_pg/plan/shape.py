"""The numbers of a model that its memory depends on: of any registered one from its config.json, and of public ones.

Weights are counted on a model that is built on torch's meta device: every tensor has its shape and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vlm_pg.bench.shapes import PUBLISHED, LanguageShape, LinearAttention
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.plan.counted import ActivationCounter


@dataclass(frozen=True)
class TowerShape:
    """One vision tower; sizes in elements, ``patch_pixels`` values of one patch, ``merge`` patches a visual token."""

    hidden: int
    layers: int
    intermediate: int
    patch_pixels: int
    merge: int


@dataclass(frozen=True)
class Weights:
    """How many there are: of the tower, the language model with its embeddings and head, and low-rank adapters.

    ``layer``: of one decoder layer. ``head``: of the output head, also where it is the embedding. ``merger``: of the
    tower's, those of the part "merger". ``linear``: of the language model's linear layers, the largest of which has
    ``largest``. ``default_adapter``: of the one that ``model.lora={}`` adds.
    """

    tower: int
    language: int
    adapter: int
    layer: int
    head: int
    merger: int = 0
    linear: int = 0
    largest: int = 0
    default_adapter: int = 0


@dataclass(frozen=True)
class ModelShape:
    """One model. ``query_key_norms``: queries and keys are normalised by head (Qwen3). ``positions``: most it reads.

    ``counter``: counts what its layers keep; None: formulas say it.
    """

    name: str
    language: LanguageShape
    tower: TowerShape | None
    weights: Weights
    query_key_norms: bool = False
    positions: int | None = None
    counter: ActivationCounter | None = field(default=None, compare=False, repr=False)


def shape_of(config: Any, settings: ModelSettings) -> ModelShape:
    """Of a transformers config.

    Raises:
        ModelError: no registered family, or one that cannot be shared exactly.
    """
    from vlm_pg.models.registry import family_of

    family = family_of(config)
    text = config.get_text_config()
    heads, kv_heads, head_dim = family.head_shape(config)
    kinds = family.layer_kinds(config)
    linear = kinds.count("linear_attention")
    language = LanguageShape(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_active_intermediate(text),
        vocab=text.vocab_size,
        tied=bool(config.tie_word_embeddings),
        gated_query=family.linear_attention,
        linear=_linear(text, linear) if linear else None,
    )
    norms = family.model_type.startswith("qwen3")
    tower = _tower(family.pixels(config), config.vision_config) if family.reads_media else None
    positions = getattr(text, "max_position_embeddings", None)
    return ModelShape(config.model_type, language, tower, _counted(config, family, settings.lora), norms, positions)


def counted_shape_of(config: Any, settings: ModelSettings) -> ModelShape:
    """As ``shape_of``; activations are counted on the model's own code when they are asked for, which takes seconds."""
    return replace(shape_of(config, settings), counter=ActivationCounter(config, settings))


def published_config(name: str) -> Any:
    """transformers' config of a Qwen2.5-VL of ``PUBLISHED``.

    The tower is that of config.json under https://huggingface.co/Qwen: 32 blocks of 1,280, of which 7, 15, 23 and 31
    attend to whole frames; MLPs of 3,420 (3B, 7B) or 3,456 (32B, 72B).
    """
    from transformers import Qwen2_5_VLConfig

    shape = PUBLISHED[name]
    return Qwen2_5_VLConfig(
        text_config={
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
            "max_position_embeddings": 128000,
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": 3420 if shape.hidden < 4096 else 3456,
            "out_hidden_size": shape.hidden,
        },
        tie_word_embeddings=shape.tied,
    )


def _active_intermediate(text: Any) -> int:
    """Width of what one token goes through: of a mixture its chosen experts and the shared one."""
    if not getattr(text, "num_experts_per_tok", None):
        return int(text.intermediate_size)
    shared = getattr(text, "shared_expert_intermediate_size", 0) or 0
    return int(text.num_experts_per_tok * text.moe_intermediate_size + shared)


def _linear(text: Any, layers: int) -> LinearAttention:
    return LinearAttention(
        layers,
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
    )


def _tower(pixels: Any, vision: Any) -> TowerShape:
    # Qwen2-VL calls its width embed_dim, and hidden_size what it gives out.
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
    values = pixels.channels * pixels.temporal_patch_size * pixels.patch_size**2
    return TowerShape(hidden, vision.depth, inner, values, pixels.patches_per_token)


def _counted(config: Any, family: Any, lora: LoraSettings | None) -> Weights:
    import torch
    import transformers

    from vlm_pg.models.lora import adapter_parameters, add_lora

    named = family.model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    with torch.device("meta"):
        model = model_class._from_config(config)
    language, tower = family.language_model(model), family.vision_tower(model)
    counts = {
        name: _number(part) for name, part in (("tower", tower), ("layer", language.layers[0])) if part is not None
    }
    total = _number(model)
    merger = sum(p.numel() for name, p in model.named_parameters() if family.part_of(name) == "merger")
    linear = [model.get_submodule(name).weight.numel() for name in family.quantizable_layers(model)]
    default_adapter = sum(
        LoraSettings().rank * sum(layer.weight.shape)
        for layer in map(model.get_submodule, family.adaptable_layers(model))
    )
    if lora is not None:
        with torch.device("meta"):
            add_lora(model, lora)
    adapter = sum(parameter.numel() for parameter in adapter_parameters(model)) if lora is not None else 0
    in_tower = counts.get("tower", 0)
    head, largest = model.lm_head.weight.numel(), max(linear, default=0)
    return Weights(
        in_tower, total - in_tower, adapter, counts["layer"], head, merger, sum(linear), largest, default_adapter
    )


def _number(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

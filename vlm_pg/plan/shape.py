"""Dimensions and numbers of weights of a model: of any registered one from its config.json, and of public ones.

Weights are counted on a model that is built on torch's meta device: every tensor has its shape and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_pg.models.memory_sizes import LanguageShape, LinearAttention, TowerShape

if TYPE_CHECKING:
    from vlm_pg.models.settings import LoraSettings, ModelSettings

# Source: config.json of the checkpoint of that name under https://huggingface.co/Qwen (for Qwen3.5-9B they are also
# transformers' defaults for Qwen3_5TextConfig).
PUBLISHED: dict[str, LanguageShape] = {
    "Qwen2.5-VL-3B": LanguageShape(2048, 36, 16, 2, 128, 11008, 151936, tied=True),
    "Qwen2.5-VL-7B": LanguageShape(3584, 28, 28, 4, 128, 18944, 152064),
    "Qwen2.5-VL-32B": LanguageShape(5120, 64, 40, 8, 128, 27648, 152064),
    "Qwen2.5-VL-72B": LanguageShape(8192, 80, 64, 8, 128, 29568, 152064),
    "Qwen3-VL-8B": LanguageShape(4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen3.5-9B": LanguageShape(
        4096, 32, 16, 4, 256, 12288, 248320, gated_query=True, linear=LinearAttention(24, 16, 32, 128, 128, 4)
    ),
}


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: of the tower, the language model with its embeddings and head, and low-rank adapters.

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
    """One model. ``query_key_norms``: queries and keys are normalized by head (Qwen3). ``positions``: its longest."""

    name: str
    language: LanguageShape
    tower: TowerShape | None
    weights: Weights
    query_key_norms: bool = False
    positions: int | None = None


def shape_of(config: Any, settings: ModelSettings) -> ModelShape:
    """Of a transformers config.

    Raises:
        ModelError: no registered family, or one that cannot be shared exactly.
    """
    from vlm_pg.models.registry import family_of

    family = family_of(config)
    return ModelShape(
        config.model_type,
        LanguageShape.of(family, config),
        TowerShape.of(family, config),
        _count_weights(config, family, settings.lora),
        family.query_key_norms,
        getattr(config.get_text_config(), "max_position_embeddings", None),
    )


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


def _count_weights(config: Any, family: Any, lora: LoraSettings | None) -> Weights:
    import torch
    import transformers

    from vlm_pg.models.lora import adapter_parameters, add_lora
    from vlm_pg.models.settings import LoraSettings

    named = family.model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    with torch.device("meta"):
        model = model_class._from_config(config)
    tower = family.vision_tower(model)
    in_tower, total = _size(tower) if tower is not None else 0, _size(model)
    layer = _size(family.language_model(model).layers[0])
    merger = sum(p.numel() for name, p in model.named_parameters() if family.part_of(name) == "merger")
    linear = [model.get_submodule(name).weight.numel() for name in family.quantizable_layers(model)]
    adaptable = map(model.get_submodule, family.adaptable_layers(model))
    default_adapter = sum(LoraSettings().rank * sum(module.weight.shape) for module in adaptable)
    if lora is not None:
        with torch.device("meta"):
            add_lora(model, lora)
    adapter = sum(parameter.numel() for parameter in adapter_parameters(model)) if lora is not None else 0
    return Weights(
        in_tower,
        total - in_tower,
        adapter,
        layer,
        model.lm_head.weight.numel(),
        merger,
        sum(linear),
        max(linear, default=0),
        default_adapter,
    )


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""Models that are counted, by name.

Source of the published numbers: ``config.json`` of the checkpoint of that name under https://huggingface.co/Qwen; those
of the language models are in ``vlm_pg/plan/shape.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from vlm_pg.bench.case import random_config
from vlm_pg.bench.runner import SIZES
from vlm_pg.errors import ConfigError
from vlm_pg.models.registry import family_of
from vlm_pg.plan.shape import PUBLISHED, published_config

NAMES = (*SIZES, "Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3.5-9B")
# The tower of Qwen3-VL-8B and Qwen3.5-9B, the latter without DeepStack.
_TOWER: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}
_TOWER |= {"patch_size": 16, "num_position_embeddings": 2304}


def config_of(model: str) -> Any:
    """transformers' config of one of ``NAMES``; ConfigError for other names."""
    if model in SIZES:
        return random_config(model)
    if model in NAMES:
        return published_config(model) if model.startswith("Qwen2.5") else _qwen3(model)
    raise ConfigError(f"The model {model!r} is not one of {', '.join(NAMES)}. Give one of these.")


def model_of(config: Any, dtype: torch.dtype) -> Any:
    """transformers' model of a configuration, with weights wherever tensors are made now."""
    named = family_of(config).model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = model_class(config)
    finally:
        torch.set_default_dtype(usual)
    if model.generation_config is not None:
        # Never drawn: a draw from no values is always token 0.
        model.generation_config.eos_token_id = config.get_text_config().vocab_size - 1
    return model


def _qwen3(name: str) -> Any:
    shape = PUBLISHED[name]
    text: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 262144,
    }
    tower, rope = _TOWER | {"out_hidden_size": shape.hidden}, {"rope_type": "default", "mrope_interleaved": True}
    if (linear := shape.linear) is None:
        text["rope_parameters"] = rope | {"rope_theta": 5e6, "mrope_section": [24, 20, 20]}
        tower |= {"deepstack_visual_indexes": [8, 16, 24]}
        return transformers.Qwen3VLConfig(text_config=text, vision_config=tower)
    text |= {
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv_width,
        "rope_parameters": rope | {"rope_theta": 1e7, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
    }
    # Of four layers the last one attends to all tokens, by transformers' default.
    return transformers.Qwen3_5Config(text_config=text, vision_config=tower)

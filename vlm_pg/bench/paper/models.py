"""Which models are counted: three published ones by name, and any of a registered family by its config.json.

Source of the published numbers: ``config.json`` of the checkpoint of that name under https://huggingface.co/Qwen; those
of the language models stand in ``bench/shapes.py``. The files themselves could not be fetched when this was last gone
through; layers, widths, heads, vocabulary, rotary sections and DeepStack indexes were compared with copies in public
code: of Qwen2.5-VL-7B a checkpoint trained from it (DiffSynth-Studio's Nexus-GenV2), of Qwen3-VL-8B the test models of
TensorRT-LLM, of Qwen3.5-9B a benchmark of vllm-ascend that names config.json as its source; and with transformers'
defaults, which are Qwen3.5-9B's and those of Qwen2.5-VL-7B's tower. They agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_pg.bench.shapes import PUBLISHED, SIZES
from vlm_pg.errors import ConfigError

DEFAULT_MODELS = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3.5-9B")
# The tower of Qwen3-VL-8B and Qwen3.5-9B, the latter without DeepStack.
_TOWER: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}
_TOWER |= {"patch_size": 16, "num_position_embeddings": 2304}
# Of a random model with text alone no position is beyond any length that is counted.
_POSITIONS = 262144


def known_models() -> tuple[str, ...]:
    """Names that stand for a configuration; anything else is a folder with config.json."""
    return (*DEFAULT_MODELS, *SIZES)


def config_of(model: str) -> Any:
    """transformers' config of a name of ``known_models``, or of a folder.

    Raises:
        ConfigError: neither.
        ModelError: a config.json that cannot be read, no registered family, or one that cannot be shared exactly.
    """
    from vlm_pg.models.loading import load_config
    from vlm_pg.models.registry import family_of
    from vlm_pg.models.settings import ModelSettings

    if model in SIZES:
        from vlm_pg.bench.case import random_config

        return random_config(model, with_tower=True)
    if model in DEFAULT_MODELS:
        return _PUBLISHED_CONFIGS[model](model)
    if not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"The model {model!r} is neither a folder with config.json nor one of {', '.join(known_models())}. Give "
            "one of these, or a checkpoint's folder, of which config.json alone is read."
        )
    config = load_config(str(Path(model).expanduser()), ModelSettings(path=model))
    family_of(config)
    return config


def model_of(config: Any, dtype: Any) -> Any:
    """transformers' model of a configuration, with weights wherever tensors are made now; with its end token."""
    import torch
    import transformers

    from vlm_pg.models.registry import family_of

    named = family_of(config).model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = model_class(config)
    finally:
        torch.set_default_dtype(usual)
    if model.generation_config is not None:
        # Nobody draws it: what is drawn from no values is always token 0.
        model.generation_config.eos_token_id = config.get_text_config().vocab_size - 1
    return model


def _qwen2_5_vl(name: str) -> Any:
    from vlm_pg.plan.shape import published_config

    return published_config(name)


def _qwen3_vl(name: str) -> Any:
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    tower = _TOWER | {"out_hidden_size": PUBLISHED[name].hidden, "deepstack_visual_indexes": [8, 16, 24]}
    return Qwen3VLConfig(text_config=_text(name) | {"rope_parameters": rope}, vision_config=tower)


def _qwen3_5(name: str) -> Any:
    from transformers import Qwen3_5Config

    shape = PUBLISHED[name]
    linear = shape.linear
    assert linear is not None
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv_width,
        "rope_parameters": rope | {"partial_rotary_factor": 0.25},
    }
    # Of four layers the last one attends to all tokens, by transformers' default.
    return Qwen3_5Config(text_config=_text(name) | text, vision_config=_TOWER | {"out_hidden_size": shape.hidden})


def _text(name: str) -> dict[str, Any]:
    shape = PUBLISHED[name]
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": _POSITIONS,
    }


_PUBLISHED_CONFIGS = {"Qwen2.5-VL-7B": _qwen2_5_vl, "Qwen3-VL-8B": _qwen3_vl, "Qwen3.5-9B": _qwen3_5}

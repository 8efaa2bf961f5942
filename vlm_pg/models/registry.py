"""The families that can be trained, one entry each; further model classes are added with ``register_family``."""

from __future__ import annotations

from typing import Any

from vlm_pg.errors import ModelError
from vlm_pg.models.family import Family

FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add the entry by which models of ``family.model_type`` are loaded, sampled from and trained.

    Raises:
        ModelError: that model type has another entry.
    """
    if FAMILIES.setdefault(family.model_type, family) != family:
        raise ModelError(
            f"Model type {family.model_type!r} is registered already, with other facts. Give the new family a "
            "model_type of its own in its config.json, and register it under that."
        )


# A language model alone: no tower, no token that only a processor may place.
_TEXT: dict[str, Any] = {"tower": None, "decoder": "model", "media_tokens": ()}
_NORMS: dict[str, Any] = {"query_key_norms": True}
_ONE_AXIS: dict[str, Any] = _TEXT | {"rotary_axes": 1, "liger": ("rms_norm", "swiglu", "rope")}
_QWEN3_VL: dict[str, Any] = {"deepstack": True, "mergers": ("merger", "deepstack_merger_list"), **_NORMS}
_QWEN3_5: dict[str, Any] = {"linear_attention": True, "liger": ("rms_norm_around_one", "swiglu", "rope"), **_NORMS}

for _family in (
    Family(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        video_time="grids",
        liger=("rms_norm", "layer_norm", "swiglu", "rope"),
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        video_time="seconds",
        liger=("rms_norm", "swiglu", "rope"),
        gated_tower=True,
    ),
    Family("qwen3_vl", "Qwen3VLForConditionalGeneration", liger=("rms_norm", "swiglu", "rope"), **_QWEN3_VL),
    Family(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        moe=True,
        read_whole=True,  # experts lie transposed in the files
        liger=("rms_norm", "rope", "swiglu"),
        **_QWEN3_VL,
    ),
    Family("qwen3_5", "Qwen3_5ForConditionalGeneration", **_QWEN3_5),
    Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", moe=True, **_QWEN3_5),
    Family("qwen2", "Qwen2ForCausalLM", **_ONE_AXIS),
    Family("qwen3", "Qwen3ForCausalLM", **_ONE_AXIS, **_NORMS),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", moe=True, **_ONE_AXIS, **_NORMS),
    # The language model of Qwen3.5 alone still takes three axes.
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", **_QWEN3_5, **_TEXT),
    Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", moe=True, **_QWEN3_5, **_TEXT),
):
    register_family(_family)


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
    kinds = family.layer_kinds(config)
    # A config without a list of layer types (Qwen3-MoE) has the window in all of them.
    windowed = not getattr(text, "layer_types", None) and getattr(text, "sliding_window", None) is not None
    if windowed or "sliding_attention" in kinds:
        raise ModelError(
            "The model uses sliding-window attention layers (sliding_attention in layer_types); only full attention is "
            "supported. Set use_sliding_window to false in the model's config.json, and take sliding_attention out of "
            "layer_types if it stands there."
        )
    allowed = ("full_attention", "linear_attention") if family.linear_attention else ("full_attention",)
    if unknown := sorted(set(kinds) - set(allowed)):
        raise ModelError(
            f"The model's config has layer_types {', '.join(unknown)}; for {family.model_type} allowed are "
            f"{', '.join(allowed)}. Use a checkpoint with these layers only."
        )
    return family

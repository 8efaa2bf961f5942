"""Triton kernels of the package liger-kernel for norms, feed-forward layers and rotary positions; never its losses.

``Family.liger`` is read off liger-kernel 0.8 beside transformers 5.23. Its rotary positions for Qwen2-VL and Qwen2.5-VL
replace a function that transformers 5.23 no longer calls there, so they are not counted.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from vlm_pg.errors import ModelError
from vlm_pg.models.registry import FAMILIES


def _parts(model: Any) -> tuple[str, ...]:
    family = FAMILIES.get(model.config.model_type)
    return family.liger if family else ()


def apply_liger(model: Any) -> None:
    """Switch ``model``, a transformers model on a GPU, to liger's kernels; other models stay as they are.

    One thing is process-wide, because transformers looks it up in its module: rotary positions, where they are used.

    Raises:
        ModelError: no GPU, no liger-kernel, or a family it has nothing for.
    """
    model_type = model.config.model_type
    parts = _parts(model)
    if not parts:
        raise ModelError(
            f"model.liger is true, but liger-kernel has nothing for model type {model_type!r}; it has kernels for "
            f"{', '.join(name for name, family in FAMILIES.items() if family.liger)}. Set model.liger=false."
        )
    device = _device_of(model)
    if device.type != "cuda":
        raise ModelError(
            f"model.liger is true, but its Triton kernels need a GPU and the model is on {device}. Move it to a GPU "
            "first, or set model.liger=false."
        )
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise ModelError(
            "model.liger is true, but the package liger-kernel is not installed. Install it with "
            "pip install 'vlm-pg[liger]', or set model.liger=false."
        ) from error
    # One function serves Qwen3.5 with its tower and without.
    patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model_type.removesuffix('_text')}")
    switches = [name for name in inspect.signature(patch).parameters if name != "model"]
    modeling = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(modeling).items() if inspect.isclass(value)}
    patch(model=model, **{name: name in parts for name in switches})
    # It also replaces classes for models still to be built, on whatever device; this was asked for this model only.
    for name, value in classes.items():
        setattr(modeling, name, value)


def liger_line(model: Any) -> str:
    """What is on, for the user."""
    names = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm", "swiglu": "SwiGLU", "rope": "rotary positions"}
    return f"liger-kernel: {', '.join(names[part] for part in _parts(model))} (not its losses)"


def _device_of(model: Any) -> Any:
    return next(model.parameters()).device

"""Triton kernels of the package liger-kernel for norms, feed-forward layers and rotary positions; never its losses."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vlm_pg.errors import ModelError
from vlm_pg.models.layer_globals import set_forward, set_layer_globals
from vlm_pg.models.registry import FAMILIES

_NAMES = {
    "rms_norm": "RMSNorm",
    "rms_norm_around_one": "RMSNorm",
    "layer_norm": "LayerNorm",
    "swiglu": "SwiGLU",
    "rope": "rotary positions",
}


def _parts(model: Any) -> tuple[str, ...]:
    family = FAMILIES.get(model.config.model_type)
    return family.liger if family else ()


def apply_liger(model: Any) -> None:
    """Switch ``model``, a transformers model on a GPU, to liger's kernels; other models stay as they are.

    Fake weights, on which work is counted and never done, may be anywhere.

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
    if not _can_run(model):
        raise ModelError(
            f"model.liger is true, but its Triton kernels need a GPU and the model is on {_weight(model).device}. Move "
            "it to a GPU first, or set model.liger=false."
        )
    try:
        from vlm_pg.models.liger_layers import FORWARDS, ROTATIONS
    except ImportError as error:
        raise ModelError(
            f"model.liger is true, but the package liger-kernel is not installed, or not as it is needed ({error}). "
            "Install it with pip install 'vlm-pg[liger]', or set model.liger=false."
        ) from error
    for part in parts:
        if part == "rope":
            changed = sum(set_layer_globals(module, ROTATIONS) for module in _attention_layers(model))
        else:
            changed = sum(_set_forward(module, FORWARDS[part]) for module in model.modules())
        if not changed:
            raise ModelError(
                f"model.liger is true, but {type(model).__name__} has nothing that liger-kernel's {_NAMES[part]} could "
                "stand in for. Use a transformers release that pyproject.toml allows, or set model.liger=false."
            )


def _set_forward(module: Any, forwards: list[tuple[Any, Any]]) -> bool:
    for fits, forward in forwards:
        if fits(module):
            set_forward(module, forward)
            return True
    return False


def _attention_layers(model: Any) -> list[Any]:
    """Those of the language model and, where there is one, of the tower."""
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def liger_line(model: Any) -> str:
    """What is on, for the user."""
    return f"liger-kernel: {', '.join(_NAMES[part] for part in _parts(model))} (not its losses)"


def _can_run(model: Any) -> bool:
    weight = _weight(model)
    return weight.device.type == "cuda" or isinstance(weight, FakeTensor)


def _weight(model: Any) -> torch.Tensor:
    return next(model.parameters())

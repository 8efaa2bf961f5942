"""QLoRA (https://arxiv.org/abs/2305.14314): the language model's linear layers in 4 bits, under an adapter that trains.

bitsandbytes' NF4 in blocks of 64 weights, whose scales are kept in 8 bits themselves (double quantization). Layers are
computed in the model's own dtype: a layer's weights are written out whole while it runs, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from vlm_pg.errors import ModelError

# A weight's 4 bits, its part of a block's 8-bit scale, and of the fp32 scale of 256 such scales.
BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)


def quantize_linears(model: Any, names: Iterable[str], device: torch.device) -> None:
    """Put the linear layers of these full names into 4 bits, on ``device``, one after the other; the rest stays.

    Layers that are in 4 bits already are left alone.

    Raises:
        ModelError: bitsandbytes is missing.
    """
    bnb = _import_bitsandbytes()
    for name in list(names):
        layer = model.get_submodule(name)
        if isinstance(layer, bnb.nn.Linear4bit):
            continue
        model.set_submodule(name, _quantized(bnb, layer, device))
    # By this peft knows how to put an adapter around such a layer.
    model.is_loaded_in_4bit = True


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a weight is kept in 4 bits: two of its numbers are one byte."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: torch.Tensor) -> int:
    """Of a weight kept in 4 bits."""
    state: Any = parameter.quant_state  # type: ignore[attr-defined]
    return math.prod(state.shape)


def _quantized(bnb: Any, layer: torch.nn.Linear, device: torch.device) -> torch.nn.Module:
    settings = {"quant_type": "nf4", "compress_statistics": True}
    with torch.device("meta"):
        small = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=layer.weight.dtype, **settings
        )
    small.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=small, **settings)
    small.bias = layer.bias
    # On some CPUs a layer in evaluation mode would pack its weights anew, for a kernel without a backward.
    small.support_avx512bf16_for_cpu = False
    return small.to(device).requires_grad_(False)


def _import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ModelError(
            "model.lora.quantize needs the package bitsandbytes, which is not installed. Install it with "
            "pip install 'vlm-pg[qlora]', or leave model.lora.quantize out to keep the model in its own dtype."
        ) from error
    return bitsandbytes

"""Sharded weights (ZeRO-3), quantized weights (NF4), and whether all are finite.

QLoRA (https://arxiv.org/abs/2305.14314) keeps the language model's linear layers in 4 bits under a trained adapter:
bitsandbytes' NF4 in blocks of 64 weights, whose scales are kept in 8 bits themselves (double quantization). Layers are
computed in the model's own dtype: a layer's weights are dequantized while it runs, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vlm_pg.distributed import RankLayout
from vlm_pg.errors import ModelError

# A weight's 4 bits, its part of a block's 8-bit scale, and of the fp32 scale of 256 such scales.
BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ranks hold shards of weights of ``module`` (ZeRO-3), so that every call of it is a collective."""
    return any(is_shard(parameter) for parameter in module.parameters())


def is_shard(weight: Tensor) -> bool:
    """Whether this rank holds only its shard of the weight, until the ranks gather it."""
    return hasattr(weight, "ds_id")


def is_on_nvme(weight: Tensor) -> bool:
    """Whether this rank's shard has to be read from a disk first (ZeRO-Infinity)."""
    return is_shard(weight) and weight.ds_tensor.status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]


def num_elements(parameter: torch.nn.Parameter) -> int:
    """Elements of the whole weight, sharded or quantized."""
    if is_quantized(parameter):
        return math.prod(parameter.quant_state.shape)  # type: ignore[attr-defined]
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole weight, sharded or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinities among the elements that this rank holds.

    A single reduction and synchronization for all in memory, unless there are some. Shards on NVMe are read one by one.
    """
    found: list[str] = []
    held: dict[str, Tensor] = {}
    for name, weight in weights:
        if not is_on_nvme(weight):
            held[name] = _held_here(weight)
            continue
        swapper = weight.nvme_swapper  # type: ignore[attr-defined]
        swapper.swap_in([weight], async_op=False)
        found += _not_finite({name: _held_here(weight)})
        swapper.remove_partition_and_release_buffers([weight])
    return found + _not_finite(held)


def _not_finite(held: dict[str, Tensor]) -> list[str]:
    held = {name: values for name, values in held.items() if values.is_floating_point() and values.numel()}
    if not held or math.isfinite(float(torch.nn.utils.get_total_norm(held.values(), math.inf))):
        return []
    return [name for name, values in held.items() if not torch.isfinite(values).all()]


def _held_here(weight: Tensor) -> Tensor:
    """Without the padding at the end of the last ranks' shards, which may be anything."""
    if not is_shard(weight):
        return weight
    part = weight.ds_tensor  # type: ignore[attr-defined]
    first = RankLayout.here().rank * part.numel()
    return part.detach().reshape(-1)[: max(0, weight.ds_numel - first)]  # type: ignore[attr-defined]


def quantize_linears(model: Any, names: Iterable[str], device: torch.device) -> None:
    """Quantize the linear layers of these full names to 4 bits, on ``device``, one after the other.

    Layers that are in 4 bits already are skipped.

    Raises:
        ModelError: bitsandbytes is missing.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ModelError(
            "model.lora.quantize needs the package bitsandbytes, which is not installed. Install it with "
            "pip install 'vlm-pg[qlora]', or leave model.lora.quantize out to keep the model in its own dtype."
        ) from error
    bnb: Any = bitsandbytes
    for name in list(names):
        layer = model.get_submodule(name)
        if isinstance(layer, bnb.nn.Linear4bit):
            continue
        settings = {"quant_type": "nf4", "compress_statistics": True}
        sizes, has_bias, dtype = (layer.in_features, layer.out_features), layer.bias is not None, layer.weight.dtype
        with torch.device("meta"):
            small = bnb.nn.Linear4bit(*sizes, has_bias, compute_dtype=dtype, **settings)
        small.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=small, **settings)
        small.bias = layer.bias
        # On some CPUs a layer in evaluation mode would pack its weights anew, for a kernel without a backward.
        small.support_avx512bf16_for_cpu = False
        model.set_submodule(name, small.to(device).requires_grad_(False))
    # By this peft knows how to put an adapter around such a layer.
    model.is_loaded_in_4bit = True


def is_quantized(parameter: Tensor) -> bool:
    """Whether a weight is kept in 4 bits: two of its numbers are one byte."""
    return getattr(parameter, "quant_state", None) is not None

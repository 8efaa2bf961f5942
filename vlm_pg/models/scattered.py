"""Weights that lie with several ranks, and whether all are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from vlm_pg.distributed import RankLayout
from vlm_pg.models.quantize import is_quantized, num_weights


def is_scattered(module: torch.nn.Module) -> bool:
    """Whether weights of ``module`` lie with several ranks (ZeRO-3), so that every call of it is a collective."""
    return any(is_part(parameter) for parameter in module.parameters())


def is_part(weight: torch.Tensor) -> bool:
    """Whether this rank has no more than its part of the weight, until the ranks gather it."""
    return hasattr(weight, "ds_id")


def is_on_nvme(weight: torch.Tensor) -> bool:
    """Whether this rank's part of the weight has to be read from a disk first (ZeRO-3)."""
    return is_part(weight) and weight.ds_tensor.status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]


def num_elements(parameter: torch.nn.Parameter) -> int:
    """Of the whole weight, wherever its parts lie and however few bits it is kept in."""
    if is_quantized(parameter):
        return num_weights(parameter)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Of the whole weight, wherever its parts lie."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinities among the elements that this rank holds.

    A single reduction and synchronization for all in memory, unless there are some. This rank's parts of weights on
    NVMe are read one by one.
    """
    found: list[str] = []
    held: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        if not is_on_nvme(weight):
            held[name] = _held_here(weight)
            continue
        swapper = weight.nvme_swapper  # type: ignore[attr-defined]
        swapper.swap_in([weight], async_op=False)
        found += _not_finite({name: _held_here(weight)})
        swapper.remove_partition_and_release_buffers([weight])
    return found + _not_finite(held)


def _not_finite(held: dict[str, torch.Tensor]) -> list[str]:
    held = {name: values for name, values in held.items() if values.is_floating_point() and values.numel()}
    if not held or math.isfinite(float(torch.nn.utils.get_total_norm(held.values(), math.inf))):
        return []
    return [name for name, values in held.items() if not torch.isfinite(values).all()]


def _held_here(weight: torch.Tensor) -> torch.Tensor:
    """Without the padding at the end of the last ranks' parts, which may be anything."""
    if not is_part(weight):
        return weight
    part = weight.ds_tensor  # type: ignore[attr-defined]
    first = RankLayout.here().rank * part.numel()
    return part.detach().reshape(-1)[: max(0, weight.ds_numel - first)]  # type: ignore[attr-defined]

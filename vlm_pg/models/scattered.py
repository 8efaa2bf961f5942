"""Whether weights lie with several ranks."""

from __future__ import annotations

import torch

from vlm_pg.models.quantize import is_quantized, num_weights


def is_scattered(module: torch.nn.Module) -> bool:
    """Whether weights of ``module`` lie with several ranks (ZeRO-3), so that every call of it is a collective."""
    return any(is_part(parameter) for parameter in module.parameters())


def is_part(weight: torch.Tensor) -> bool:
    """Whether this rank has no more than its part of the weight, until the ranks gather it."""
    return hasattr(weight, "ds_id")


def num_elements(parameter: torch.nn.Parameter) -> int:
    """Of the whole weight, wherever its parts lie and however few bits it is kept in."""
    if is_quantized(parameter):
        return num_weights(parameter)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Of the whole weight, wherever its parts lie."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))

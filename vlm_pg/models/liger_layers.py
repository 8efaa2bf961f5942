"""Forwards of transformers' modules on liger-kernel's operators; imported where ``model.liger`` allows them.

liger-kernel's own functions that patch whole models do not work here: those of 0.8 import output classes for its losses
that transformers 5.23 no longer has, and fail for Qwen-VL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
from liger_kernel.transformers.swiglu import LigerExperts
from torch import Tensor

from vlm_pg.models.kernel_trials import is_gated, is_silu

# Where a norm rounds: "llama" in the input's dtype before it multiplies by the weight, "gemma" after that.
_ROUNDS_BEFORE_WEIGHT, _ROUNDS_AFTER = "llama", "gemma"


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Qwen2's and Qwen3's: times the weight. Its backward overwrites the upstream gradient, which has no other reader:
    a norm's output goes into a linear layer or a rotation, never into a sum."""
    return LigerRMSNormFunction.apply(
        hidden_states, self.weight, self.variance_epsilon, 0.0, _ROUNDS_BEFORE_WEIGHT, True, None
    )


def rms_norm_around_one(self: Any, x: Tensor) -> Tensor:
    """Qwen3.5's: times one plus the weight, all of it in fp32; the upstream gradient is not overwritten."""
    return LigerRMSNormFunction.apply(x, self.weight, self.eps, 1.0, _ROUNDS_AFTER, False, None)


def layer_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.eps)


def swiglu(self: Any, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))"""
    return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


experts = LigerExperts.forward


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """q [B, N, T, H], k [B, K, T, H] by cos, sin [B or 1, T, R], the first R of the H numbers, in place.

    The same for all families: transformers 5.23 computes one cosine of a token's three positions beforehand. Queries
    and keys come from linear layers and norms, whose backward does not need their outputs.
    """
    if unsqueeze_dim != 1:
        raise ValueError(f"rotate got unsqueeze_dim={unsqueeze_dim}; only heads before tokens (1) are supported.")
    return LigerRopeFunction.apply(q, k, cos, sin)


def rotate_patches(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A tower's: q, k [T, N, H] by cos, sin [T, H], in fp32."""
    wide_q, wide_k = (x.float()[None].transpose(1, 2) for x in (q, k))
    rotated_q, rotated_k = rotate(wide_q, wide_k, cos.float(), sin.float())
    return rotated_q.transpose(1, 2)[0].to(q.dtype), rotated_k.transpose(1, 2)[0].to(k.dtype)


ROTATIONS = {"apply_rotary_pos_emb": rotate, "apply_rotary_pos_emb_vision": rotate_patches}


def _named(end: str, module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith(end)


def _is_experts(module: torch.nn.Module) -> bool:
    return _named("Experts", module) and is_silu(module) and hasattr(module, "gate_up_proj")


# Of each part: which modules it changes, and their forward. Rotations are in ``ROTATIONS``.
FORWARDS: dict[str, tuple[Callable[[Any], bool], Callable[..., Tensor]]] = {
    "rms_norm": (partial(_named, "RMSNorm"), rms_norm),
    "rms_norm_around_one": (partial(_named, "RMSNorm"), rms_norm_around_one),
    "layer_norm": (partial(_named, "LayerNorm"), layer_norm),
    "swiglu": (is_gated, swiglu),
    "experts": (_is_experts, experts),
}

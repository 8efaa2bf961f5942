"""Plain softmax under an explicit mask: the definition every kernel is tested against."""

from __future__ import annotations

import torch

from vlm_pg.attention.plan import AttentionPlan, full_plan
from vlm_pg.attention.tree import PrefixTree


def oracle_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PrefixTree, scale: float | None = None
) -> torch.Tensor:
    """Same contract as ``grouped_attention``, by a [T, T] mask, softmax and plain autograd; memory grows with T * T."""
    return oracle_over_plan(q, k, v, full_plan(tree), scale)


def oracle_over_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float | None = None
) -> torch.Tensor:
    """The same where only some rows ask: q holds those, k and v all rows of the tree."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(repeats, dim=1)
    values = v.to(wide).repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qnh,knh->nqk", q.to(wide), keys) * scale
    scores = scores.masked_fill(~plan.mask(q.device), float("-inf"))
    return torch.einsum("nqk,knh->qnh", scores.softmax(dim=-1), values).to(q.dtype)

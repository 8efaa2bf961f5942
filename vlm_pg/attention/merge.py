"""Joining partial softmax results over disjoint key sets.

For a query row with partial outputs o_b and log-sum-exps l_b, the result over all keys is
l = logaddexp_b l_b,  o = sum_b exp(l_b - l) o_b. With two partials this is o1 + sigmoid(l2 - l1) (o2 - o1), which
never exponentiates a large number.
"""

from __future__ import annotations

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge a second partial result into the first, in place.

    Args:
        out: fp32 (or fp64) [rows, N, H], overwritten.
        lse: fp32 (or fp64) [N, rows], overwritten.
        other_out: [rows, N, H], any floating dtype.
        other_lse: [N, rows].
    """
    weight = torch.sigmoid(other_lse - lse).transpose(0, 1).unsqueeze(-1).to(out.dtype)
    out.lerp_(other_out.to(out.dtype), weight)
    torch.logaddexp(lse, other_lse, out=lse)

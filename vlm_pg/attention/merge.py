"""Joining partial softmax results over disjoint key sets.

For a query row with partial outputs o_b and log-sum-exps l_b, the result over all keys is
l = logaddexp_b l_b,  o = sum_b exp(l_b - l) o_b. With two partials this is o1 + w (o2 - o1) with w = sigmoid(l2 - l1),
which never exponentiates a large number. In half precision, as o2 w + o1 (1 - w), its kernels read half precision,
compute in fp32 and round once; no partial result is copied to fp32. Into fp32 it is a cast and one interpolation: fewer
kernels that move the same bytes.
"""

from __future__ import annotations

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge a second partial result into the first, in place.

    Args:
        out: [rows, N, H], any floating dtype, overwritten; where a third result follows, fp32 or fp64, so that what is
            in between is not rounded.
        lse: fp32 (or fp64) [N, rows], overwritten.
        other_out: [rows, N, H], any floating dtype.
        other_lse: [N, rows].
    """
    if out.dtype == lse.dtype:
        weight = torch.sigmoid(other_lse - lse).transpose(0, 1).unsqueeze(-1)
        out.lerp_(other_out.to(out.dtype), weight)
    else:
        # w and 1 - w, [rows, N, 1] each.
        other_weight, weight = torch.stack([other_lse, lse]).softmax(0).transpose(1, 2).unsqueeze(-1)
        torch.addcmul(torch.mul(other_out, other_weight), out, weight, out=out)
    torch.logaddexp(lse, other_lse, out=lse)

"""Plain softmax: the definition every kernel is tested against, and a slow kernel that runs anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from vlm_pg.attention.kernels.base import Grads, Kernel, OutLse
from vlm_pg.attention.plan import AttentionPlan, full_plan
from vlm_pg.attention.tree import PrefixTree, SegmentCall


def oracle_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree | AttentionPlan, scale: float | None = None
) -> Tensor:
    """Same contract as ``grouped_attention``, by an explicit mask, softmax and plain autograd.

    Memory grows with the square of the number of tokens.
    """
    plan = tree if isinstance(tree, AttentionPlan) else full_plan(tree)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q.to(wide), keys) * scale
    scores = scores.masked_fill(~plan.mask(q.device), float("-inf"))
    return torch.einsum("nqk,knh->qnh", scores.softmax(dim=-1), values).to(q.dtype)


class OracleKernel(Kernel):
    """Runs anywhere. ``grouped_attention`` sends it to the explicit mask; only decoding calls it segment by segment."""

    name = "oracle"
    by_name_only = True

    @classmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def segments_forward(self, q: Tensor, k: Tensor, v: Tensor, call: SegmentCall, scale: float) -> OutLse:
        outs, lses = [], []
        queries, keys, values = (
            rows[: sum(lengths)].split(list(lengths))
            for rows, lengths in ((q, call.query_lengths), (k, call.key_lengths), (v, call.key_lengths))
        )
        for q_i, k_i, v_i in zip(queries, keys, values, strict=True):
            out, lse = _softmax_attention(q_i[None], k_i[None], v_i[None], scale, call.causal)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, dim=1)

    def segments_backward(self, *_: object) -> Grads:
        raise AssertionError("the oracle is differentiated by plain autograd, see oracle_attention")

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
        return _softmax_attention(q, k, v, scale, causal=False)

    def ragged_forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> OutLse:
        masked = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
        out, lse = _softmax_attention(q[:, None], k, v, scale, causal=False, masked=masked[:, None, None])
        return out[:, 0], lse[:, :, 0].transpose(0, 1)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, masked: Tensor | None = None
) -> OutLse:
    """q [B, Lq, N, H], k, v [B, Lk, K, H], masked bool like [B, N, Lq, Lk] -> out [B, Lq, N, H], lse [B, N, Lq]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x.to(wide).repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q.to(wide), keys) * scale
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bnqk,bknh->bqnh", (scores - lse[..., None]).exp(), values).to(q.dtype), lse

"""Attention over a PrefixTree: shared nodes are attended to where they lie, once, by all their descendants.

Forward: one call for every node's self-attention, one per (level, ancestor level) pair, partial results merged.
Backward: each call's stock backward is given the upstream gradient, the MERGED output and the MERGED log-sum-exp.
It recomputes P_ij = exp(S_ij - l_i) and D_i = <do_i, o_i> from them, which is its exact share of the full softmax's
gradient: dq adds up over the calls and dk, dv need no correction. So only q, k, v, out and lse are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.kernels.base import Grads, OutLse
from vlm_pg.attention.kernels.oracle import oracle_attention
from vlm_pg.attention.plan import AttentionPlan, full_plan
from vlm_pg.attention.tree import PrefixTree, SegmentCall


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: PrefixTree | AttentionPlan,
    scale: float | None = None,
    kernel: Kernel | str | None = None,
    memo: AttentionMemo | None = None,
) -> Tensor:
    """Attention in which every token sees its node's ancestors and, causally, its own node.

    Args:
        q: [T, N, H]; T is ``tree.num_tokens``. With a plan of some rows (``reading_plan``): those rows only.
        k, v: [T, K, H]; N must be a multiple of K (grouped-query attention, never repeated in memory).
        tree: which tokens attend to which.
        scale: factor on the scores; default H ** -0.5.
        kernel: a kernel or its name; default: chosen by device and dtype.
        memo: stores the result for a recomputation (activation checkpointing), which then costs nothing here.

    Returns:
        As q, in q's dtype, differentiable in q, k and v.

    Raises:
        ValueError: shapes that do not fit the tree or each other.
    """
    plan = tree if isinstance(tree, AttentionPlan) else full_plan(tree)
    _check_shapes(q, k, v, plan)
    q, k, v = _one_dtype(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = kernel if isinstance(kernel, Kernel) else select_kernel(q.device, q.dtype, kernel or "auto")
    if chosen.name == "oracle":
        return oracle_attention(q, k, v, plan, scale)
    return _GroupedAttention.apply(q, k, v, plan, scale, chosen, memo)


class AttentionMemo:
    """Output and log-sum-exp of one layer between a checkpointed forward and its recomputation.

    A checkpointed layer runs twice; attention is its only part whose cost grows with the square of the length, and its
    result is about as large as the layer's input. So the second run takes it from here.

    Args:
        offload: moves a tensor away until its ``get`` is called; None: tensors stay on the device.
    """

    def __init__(self, offload: Callable[[Tensor], Any] | None = None) -> None:
        self._offload = offload
        self._stored: tuple[Any, Any] | None = None

    def take(self) -> OutLse | None:
        stored, self._stored = self._stored, None
        if stored is None or self._offload is None:
            return stored
        return stored[0].get(), stored[1].get()

    def put(self, out: Tensor, lse: Tensor) -> None:
        self._stored = (out, lse) if self._offload is None else (self._offload(out), self._offload(lse))


def forward_with_lse(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, kernel: Kernel) -> OutLse:
    """Merged output (as q) and merged log-sum-exp fp32/fp64 [N, rows of q]; no autograd."""

    def part(call: SegmentCall) -> OutLse:
        return kernel.segments_forward(q[call.query_rows], k[call.key_rows], v[call.key_rows], call, scale)

    if len(plan.own) == 1 and plan.own[0].query_range == (0, plan.num_queries):
        out, lse = part(plan.own[0])
    elif _in_a_row((call.query_range for call in plan.own), plan.num_queries):
        outs, lses = zip(*map(part, plan.own), strict=True)
        out, lse = torch.cat(outs), torch.cat(lses, 1)
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
        for call in plan.own:
            out[call.query_rows], lse[:, call.query_rows] = part(call)
    if not plan.above:
        return out, lse
    lse = lse.contiguous()
    # A row that two further results are merged into would be rounded in between: such rows are widened meanwhile.
    rows = slice(plan.above[0].query_range[0], plan.above[-1].query_range[1])
    merged = out[rows] if plan.merges_once else out[rows].to(lse.dtype)
    for call in plan.above:
        first, last = (row - rows.start for row in call.query_range)
        merge_(merged[first:last], lse[:, call.query_rows], *part(call))
    if merged.dtype != out.dtype:
        out[rows] = merged
    return out, lse


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge a second partial result over other keys into the first, in place.

    For a query row with partial outputs o_b and log-sum-exps l_b, the result over all keys is
    l = logaddexp_b l_b,  o = sum_b exp(l_b - l) o_b. With two partials this is o1 + w (o2 - o1) with
    w = sigmoid(l2 - l1), which never exponentiates a large number. In half precision, as o2 w + o1 (1 - w), its kernels
    read half precision, compute in fp32 and round once; no partial result is copied to fp32. Into fp32 it is a cast and
    one interpolation: fewer kernels that move the same bytes.

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


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        plan, scale, kernel, memo = options
        stored = memo.take() if memo is not None else None
        out, lse = stored or forward_with_lse(q, k, v, plan, scale, kernel)
        if memo is not None and stored is None:
            # Detached: the memo must not reference this run's graph.
            memo.put(out.detach(), lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_outputs[0].contiguous()
        plan, scale, kernel = ctx.plan, ctx.scale, ctx.kernel

        def part(call: SegmentCall) -> Grads:
            rows, keys = call.query_rows, call.key_rows
            return kernel.segments_backward(
                grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], call, scale
            )

        calls = (*plan.own, *plan.above)
        whole = _in_a_row((call.query_range for call in plan.own), plan.num_queries) and _in_a_row(
            (call.key_range for call in plan.own), plan.num_keys
        )
        if whole:
            own = [part(call) for call in plan.own]
            sums = list(own[0]) if len(own) == 1 else [torch.cat(grads) for grads in zip(*own, strict=True)]
            del own
            calls = plan.above
        else:
            sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        # A row that one further gradient is added to is rounded once, whatever the dtype of the sum. Where there are
        # more (a level above another one, keys that several levels read), they are summed in fp32.
        if not (whole and plan.merges_once):
            sums[0] = sums[0].to(lse.dtype)
        if not (whole and plan.keys_read_once):
            sums[1:] = (grad.to(lse.dtype) for grad in sums[1:])
        for call in calls:
            rows = (call.query_rows, call.key_rows, call.key_rows)
            # All three at once: on a GPU one kernel, as long as they are small enough for that to matter.
            torch._foreach_add_([total[chosen] for total, chosen in zip(sums, rows, strict=True)], list(part(call)))
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), None, None, None, None


def _in_a_row(ranges: Iterable[tuple[int, int]], end: int) -> bool:
    """Whether they are 0 to ``end``, each beginning where the one before it ends."""
    bounds = [0, *chain.from_iterable(ranges), end]
    return bounds[::2] == bounds[1::2]


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast projections come in half precision, and rotary positions widen queries and keys again."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"grouped_attention got q {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; "
            "they must agree. Convert them, or use torch.autocast."
        )
    return q, k, v


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise ValueError(
            f"grouped_attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "it takes q [tokens, heads, dim] and k, v [tokens, kv_heads, dim]."
        )
    if q.shape[0] != plan.num_queries or k.shape[0] != plan.num_keys:
        raise ValueError(
            f"grouped_attention got {q.shape[0]} query and {k.shape[0]} key tokens for a tree of {plan.num_keys}, with "
            f"{plan.num_queries} query rows; pass the whole packed stream, and queries of exactly the plan's rows."
        )
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"grouped_attention got {q.shape[1]} query heads of {q.shape[2]} and {k.shape[1]} key-value heads of "
            f"{k.shape[2]}; query heads must be a multiple of key-value heads, with one head dim."
        )

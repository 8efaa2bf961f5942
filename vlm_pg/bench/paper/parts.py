"""Operations that run as several on the device, or with memory of their own: what else is made, and for how long.

A part is called in the operation's place, with the operation and its arguments; what it calls is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlm_pg.bench.paper.cuda_kernels import UNSORTED_ROWS

# Rows that the sums for dq have beyond each segment's queries, so that segments do not touch (flash_api.cpp).
_BETWEEN_SEGMENTS = 128


def _logsumexp(_: Any, x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """As ReduceOps.cpp does it: with a tensor of all exponentials on the way, and infinite largest values as zeros."""
    (axis,) = dim if isinstance(dim, (list, tuple)) else (dim,)
    top = x.amax(axis, keepdim=True)
    squeezed = top if keepdim else top.squeeze(axis)
    squeezed.masked_fill_(squeezed.abs() == torch.inf, 0)
    total = (x - top).exp_().sum(axis, keepdim=keepdim)
    return total.log_().add_(squeezed)


def _flash_backward(operation: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Variable-length: q [rows, N, H], k [keys, K, H] (flash_api.cpp, ``mha_varlen_bwd``)."""
    rows, segments = args[1].shape[0], args[6].numel() - 1
    return _with_sums(operation, rows + _BETWEEN_SEGMENTS * segments, args, options)


def _dense_flash_backward(operation: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Batches: q [B, N, rows, H], k [B, K, keys, H] (``mha_bwd``)."""
    batch, _, rows = args[1].shape[:3]
    return _with_sums(operation, batch * -(-rows // _BETWEEN_SEGMENTS) * _BETWEEN_SEGMENTS, args, options)


def _with_sums(operation: Any, rows: int, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """dq is summed in fp32; dk and dv are made for each query head, then summed over those that share keys."""
    q, k = args[1:3]
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[-1]
    held = [q.new_empty(rows, heads, size, dtype=torch.float32), q.new_empty(rows, heads, dtype=torch.float32)]
    if heads == kv_heads:
        return operation(*args, **options)
    # Heads last but one, as the kernels have them.
    tokens = k.shape[:1] if k.dim() == 3 else (k.shape[0], k.shape[2])
    by_query_head = [k.new_empty(*tokens, kv_heads, heads // kv_heads, size) for _ in range(2)]
    dq, *gradients = operation(*args, **options)
    del held
    for gradient, parts in zip(gradients, by_query_head, strict=True):
        torch.sum(parts, -2, out=gradient if k.dim() == 3 else gradient.transpose(1, 2))
    return dq, *gradients


def _embedding_backward(operation: Any, grad: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Of many rows sums in fp32 (EmbeddingBackwardKernel.cu)."""
    many = ids.numel() > UNSORTED_ROWS
    sums = grad.new_empty(ids.numel(), grad.shape[-1], dtype=torch.float32) if many else None
    out = operation(grad, ids, *rest)
    del sums
    return out


PARTS: dict[str, Callable[..., Any]] = {"logsumexp": _logsumexp}
PARTS_ON_GPU: dict[str, Callable[..., Any]] = {
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention_backward": _dense_flash_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _dense_flash_backward,
    "embedding_dense_backward": _embedding_backward,
}

"""What one operation costs: its kind, floating-point operations, bytes and kernels; from its name and operands.

Bytes are those of a kernel that reads each operand once and writes each result once, and keeps nothing in caches from
one kernel to the next. A gathered operand costs what is read of it. An expanded dimension is one row of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

# They make another view of memory, reserve it, or ask something about a tensor: no kernel runs.
NO_KERNEL = frozenset(
    [
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "detach",
        "alias",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "unbind",
        "as_strided",
        "chunk",
        "unfold",
        "diagonal",
        "lift_fresh",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "device",
        "is_same_size",
        "is_pinned",
        "real",
        "view_as_real",
        "resize_",
    ]
)
MATMUL = frozenset(["mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward"])
COPY = frozenset(
    [
        "copy_",
        "clone",
        "cat",
        "stack",
        "index_select",
        "gather",
        "index",
        "index_copy",
        "index_copy_",
        "index_add",
        "index_add_",
        "embedding",
        "embedding_dense_backward",
        "scatter",
        "scatter_",
        "scatter_add",
        "slice_backward",
        "select_backward",
        "index_put",
        "index_put_",
        "slice_scatter",
        "constant_pad_nd",
        "repeat",
        "fill_",
        "zero_",
        "zeros",
        "zeros_like",
        "new_zeros",
        "full",
        "full_like",
        "ones",
        "ones_like",
        "arange",
    ]
)
REDUCTION = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "max",
        "argmax",
        "logsumexp",
        "cumsum",
        "sort",
        "topk",
        "_softmax",
        "_log_softmax",
        "any",
        "all",
        "linalg_vector_norm",
    ]
)
# They write and read nothing.
FILLS = frozenset(
    ["fill_", "zero_", "zeros", "zeros_like", "new_zeros", "full", "full_like", "ones", "ones_like", "arange"]
)
# They read as many elements of their first operand as they write.
GATHERS = frozenset(("embedding", "index_select", "gather", "index"))
# They touch of their first operand only where they write.
SCATTERS = frozenset(("index_copy_", "index_add_", "index_put_", "scatter_"))
# The host waits for what the device finds.
WAITS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique_dim", "_unique2"))
# Flash attention's backward: row sums of out * grad_out, the gradients, and the cast of dq.
KERNELS = {"_flash_attention_backward": 3, "_scaled_dot_product_flash_attention_for_cpu_backward": 3}


def kind_of(name: str) -> str:
    """One of ``KINDS``."""
    if name in MATMUL:
        return "matmul"
    if "attention" in name:
        return "attention"
    if name in COPY:
        return "copy"
    return "reduction" if name in REDUCTION else "elementwise"


def kernels_of(name: str) -> int:
    """How many kernels are launched."""
    return 0 if name in NO_KERNEL else KERNELS.get(name, 1)


def flops_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Of products of matrices and of attention; everything else is bound by memory, and counts as none."""
    count = _FLOPS.get(name)
    return 0 if count is None else count(args, kwargs)


def bytes_of(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Read and written."""
    if name in NO_KERNEL:
        return 0
    # What "out" names is written, and not read.
    ins = tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
    outs = tensors_in(out)
    written = sum(map(spanned_bytes, outs))
    if name in FILLS:
        return written
    if name in GATHERS:
        return 2 * written + sum(spanned_bytes(x) for x in ins if not x.dtype.is_floating_point)
    if name == "copy_":
        return written + spanned_bytes(ins[1])
    if name in SCATTERS:
        # Operands behind the first: where, and what; as much is written as is given.
        given = sum(map(spanned_bytes, ins[1:]))
        return given + sum(spanned_bytes(x) for x in ins[1:] if x.dtype == ins[0].dtype)
    return written + sum(map(spanned_bytes, ins))


def spanned_bytes(x: torch.Tensor) -> int:
    """Bytes of memory that a tensor has elements in."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors among arguments or results."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    return 2 * a.numel() * b.shape[-1]


def _pairs(cu_q: torch.Tensor, cu_k: torch.Tensor, causal: bool) -> int:
    """(query, key) pairs of a variable-length call, from its real cumulative lengths; causal: aligned at the top."""
    lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    return sum(_rectangle(queries, keys, causal) for queries, keys in lengths)


def _rectangle(queries: int, keys: int, causal: bool) -> int:
    if not causal:
        return queries * keys
    short = min(queries, keys)
    return short * (short + 1) // 2 + (queries - short) * keys


def _flash(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    q, k, _, cu_q, cu_k = args[:5]
    causal = args[8] if len(args) > 8 else kwargs["is_causal"]
    if cu_q is None:
        pairs = q.shape[0] * _rectangle(q.shape[1], k.shape[1], causal)
    else:
        pairs = _pairs(cu_q, cu_k, causal)
    return 4 * pairs * q.shape[-2] * q.shape[-1]


def _flash_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    q = args[1]
    return 10 * _pairs(args[6], args[7], args[11]) * q.shape[-2] * q.shape[-1]


def _dense(operations: int, first: int) -> Callable[[Sequence[Any], dict[str, Any]], int]:
    def count(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        q, k = args[first], args[first + 1]
        flags = [value for value in args if isinstance(value, bool)]
        causal = flags[0] if flags else kwargs.get("is_causal", False)
        pairs = q.shape[0] * q.shape[1] * _rectangle(q.shape[2], k.shape[2], causal)
        return operations * pairs * q.shape[3]

    return count


_FLOPS: dict[str, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    "mm": lambda args, _: _product(args[0], args[1]),
    "bmm": lambda args, _: _product(args[0], args[1]),
    "addmm": lambda args, _: _product(args[1], args[2]),
    "baddbmm": lambda args, _: _product(args[1], args[2]),
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _dense(4, 0),
    "_scaled_dot_product_flash_attention_backward": _dense(10, 1),
    "_scaled_dot_product_flash_attention_for_cpu": _dense(4, 0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _dense(10, 1),
}

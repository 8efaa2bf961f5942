"""What one operation costs: its kind, floating-point operations, bytes and kernels; from its name and operands.

Bytes are those of a kernel that reads each operand once and writes each result once, and keeps nothing in caches from
one kernel to the next. A gathered operand costs what is read of it. An expanded dimension is one row of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
        "unsafe_split",
        "unsafe_chunk",
        "unsqueeze_",
        "squeeze_",
        "transpose_",
        "t_",
        "detach_",
        "view_as_complex",
        "promote_types",
    ]
)
MATMUL = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "_grouped_mm", "convolution", "convolution_backward"]
)
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
        "scatter_add_",
        "index_fill_",
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
    ["fill_", "zero_", "zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like"]
    + ["new_ones", "arange", "normal_", "uniform_", "exponential_", "bernoulli_", "random_", "rand", "randn"]
    + ["rand_like", "randn_like", "randint"]
)
# They read as many elements of their first operand as they write.
GATHERS = frozenset(("embedding", "index_select", "gather", "index"))
# They touch of their first operand only where they write.
SCATTERS = frozenset(("index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_", "index_fill_"))
# They read what stands there too.
_ADDING = frozenset(("index_add_", "scatter_add_"))
# Memory is filled with zeros first, then a part of it gets what is given.
_PADDING = frozenset(("slice_backward", "select_backward", "constant_pad_nd"))
# The host waits for what the device finds.
WAITS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique_dim", "_unique2", "equal"))
# Flash attention's backward: row sums of out * grad_out, the gradients, and the cast of dq.
KERNELS = {
    "_flash_attention_backward": 3,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
} | dict.fromkeys(_PADDING, 2)
# Of operators that replace an operand in place and give something else back, which one.
_REPLACED = {"gated_delta_step_": 0}
# Which lists of tensors an optimizer's kernel for many tensors writes: weights and both moments.
_FUSED_WRITES = (0, 2, 3)


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


def waits_for(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for what the device finds."""
    if name == "repeat_interleave":
        # How often is known to the device alone, and with it the length of the result, unless that is given.
        return isinstance(args[0], torch.Tensor) and kwargs.get("output_size") is None
    return name in WAITS


def flops_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Of products of matrices, convolutions and attention; the rest is bound by memory, and counts as none."""
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
    if name.endswith("_") and not outs:  # a list of tensors in place gives nothing back
        lists = [args[index] for index in _FUSED_WRITES] if name.startswith("_fused_adam") else args[0]
        written = sum(map(spanned_bytes, tensors_in(lists)))
    if name in _REPLACED:
        written += spanned_bytes(args[_REPLACED[name]])
    if name in FILLS:
        return written
    if name in _PADDING:
        return written + 2 * spanned_bytes(ins[0])
    if name in GATHERS:
        return 2 * written + sum(spanned_bytes(x) for x in ins if not x.dtype.is_floating_point)
    if name == "copy_":
        return written + spanned_bytes(ins[1])
    if name == "_grouped_mm" and ins[1].dim() == 3 > ins[0].dim():
        # Who gets a row is known to no count: as many experts as there are rows, at the most.
        rows, experts = ins[0].shape[0], ins[1].shape[0]
        of_experts = spanned_bytes(ins[1]) * min(rows, experts) // max(1, experts)
        return written + of_experts + sum(spanned_bytes(x) for x in ins if x is not ins[1])
    if name == "_flash_attention_forward" and args[4] is not None:
        return written + spanned_bytes(args[0]) + _keys_read(args, kwargs)
    if name == "searchsorted":
        # A binary search in each row.
        return written + spanned_bytes(args[1]) * args[0].shape[-1].bit_length()
    if name in SCATTERS:
        # Operands behind the first: where, and what; as much is written as is given, or as there are places.
        given = sum(map(spanned_bytes, ins[1:]))
        touched = sum(spanned_bytes(x) for x in ins[1:] if x.dtype == ins[0].dtype)
        if not touched:  # one number for all places; of index_fill_ a place is a row
            rows = ins[0].shape[args[1]] if name == "index_fill_" else ins[0].numel()
            touched = ins[1].numel() * ins[0].numel() // max(1, rows) * ins[0].element_size()
        accumulates = name == "index_put_" and (args[3] if len(args) > 3 else kwargs.get("accumulate"))
        adds = name in _ADDING or accumulates
        return given + touched * (2 if adds else 1)
    return written + sum(map(spanned_bytes, ins))


def spanned_bytes(x: torch.Tensor) -> int:
    """Bytes of memory that a tensor has elements in."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors among arguments or results, which are asked for at every operation: torch's own trees take ten times
    as long."""
    found: list[torch.Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, tuple | list):
        for entry in tree:
            _add_tensors(entry, found)
    elif isinstance(tree, dict):
        for entry in tree.values():
            _add_tensors(entry, found)


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    return 2 * a.numel() * b.shape[-1]


def _grouped_product(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of ``_grouped_mm``: groups cut the rows, the columns or the sum."""
    if a.dim() == b.dim():
        return _product(a, b)
    return _product(a, b) if b.dim() == 3 else 2 * a[0].numel() * b.shape[-1]


def _convolution(args: Sequence[Any]) -> int:
    x, weight, padding, strides, dilation = args[0], args[1], args[4], args[3], args[5]
    if args[6]:  # transposed: every element of the input meets all that a channel's kernels hold
        return 2 * x.numel() * weight[0].numel()
    kernel = weight.shape[2:]
    places = 1
    for index, size in enumerate(x.shape[2:]):
        stride, pad, spread = (values[index % len(values)] for values in (strides, padding, dilation))
        places *= (size + 2 * pad - spread * (kernel[index] - 1) - 1) // stride + 1
    return 2 * x.shape[0] * places * weight.numel()


def _convolution_backward(args: Sequence[Any]) -> int:
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    each = 2 * x.numel() * weight[0].numel() if args[7] else 2 * grad.numel() * weight[0].numel()
    return each * (bool(mask[0]) + bool(mask[1]))


def _pairs(cu_q: torch.Tensor, cu_k: torch.Tensor, causal: bool, used: torch.Tensor | None = None) -> int:
    """(query, key) pairs of a variable-length call, from its real cumulative lengths.

    ``used``: keys of each segment that are looked at, where that is fewer.
    """
    keys_of = cu_k.diff() if used is None else used
    lengths = zip(cu_q.diff().tolist(), keys_of.tolist(), strict=True)
    return sum(_rectangle(queries, keys, causal, at_end=True) for queries, keys in lengths)


def _rectangle(queries: int, keys: int, causal: bool, at_end: bool) -> int:
    """``at_end``: the last query sees the last key, as in FlashAttention-2; else the first one the first key."""
    if not causal:
        return queries * keys
    short = min(queries, keys)
    beyond = (keys if at_end else queries) - short
    return short * (short + 1) // 2 + beyond * short


def _keys_read(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Bytes of keys and values in a variable-length call: of segments with queries, as far as they are used."""
    k, v, cu_q, cu_k = args[1:5]
    used = _used(cu_k, kwargs)
    count = sum(keys for queries, keys in zip(cu_q.diff().tolist(), used, strict=True) if queries)
    return count * (k[0].nbytes + v[0].nbytes)


def _used(cu_k: torch.Tensor, kwargs: dict[str, Any]) -> list[int]:
    """Keys of each segment; less than its room where the call says so."""
    used = kwargs.get("seqused_k")
    return (cu_k.diff() if used is None else used).tolist()


def _flash(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    q, k, _, cu_q, cu_k = args[:5]
    causal = args[8] if len(args) > 8 else kwargs["is_causal"]
    return 4 * _flash_pairs(q, k, cu_q, cu_k, causal, kwargs.get("seqused_k")) * q.shape[-2] * q.shape[-1]


def _flash_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    q, k = args[1], args[2]
    return 10 * _flash_pairs(q, k, args[6], args[7], args[11]) * q.shape[-2] * q.shape[-1]


def _flash_pairs(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    causal: bool,
    used: torch.Tensor | None = None,
) -> int:
    """q, k [rows, heads, H] with cumulative lengths, or [batch, rows, heads, H] without."""
    if cu_q is None or cu_k is None:
        return q.shape[0] * _rectangle(q.shape[1], k.shape[1], causal, at_end=True)
    return _pairs(cu_q, cu_k, causal, used)


def _dense(operations: int, first: int, at_end: bool = False) -> Callable[[Sequence[Any], dict[str, Any]], int]:
    def count(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        q, k = args[first], args[first + 1]
        flags = [value for value in args if isinstance(value, bool)]
        causal = flags[0] if flags else kwargs.get("is_causal", False)
        pairs = q.shape[0] * q.shape[1] * _rectangle(q.shape[2], k.shape[2], causal, at_end)
        return operations * pairs * q.shape[3]

    return count


_FLOPS: dict[str, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    "mm": lambda args, _: _product(args[0], args[1]),
    "bmm": lambda args, _: _product(args[0], args[1]),
    "addmm": lambda args, _: _product(args[1], args[2]),
    "baddbmm": lambda args, _: _product(args[1], args[2]),
    "mv": lambda args, _: 2 * args[0].numel(),
    "dot": lambda args, _: 2 * args[0].numel(),
    "linear": lambda args, _: 2 * args[0].numel() * args[1].shape[0],
    "_grouped_mm": lambda args, _: _grouped_product(args[0], args[1]),
    "convolution": lambda args, _: _convolution(args),
    "convolution_backward": lambda args, _: _convolution_backward(args),
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _dense(4, 0, at_end=True),
    "_scaled_dot_product_flash_attention_backward": _dense(10, 1, at_end=True),
    "_scaled_dot_product_flash_attention_for_cpu": _dense(4, 0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _dense(10, 1),
}

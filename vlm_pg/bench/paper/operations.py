"""What one operation costs: its kind, floating-point operations, bytes and kernels; from its name and operands.

Bytes are those of a kernel that reads each operand once and writes each result once, and keeps nothing in caches from
one kernel to the next. A gathered operand costs what is read of it. An expanded dimension is one row of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlm_pg.bench.paper.cuda_kernels import (
    NO_KERNEL,
    UNSORTED_ROWS,
    accumulates,
    embedding_rows,
    flash_splits,
    tensors_in,
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
# Of operators that replace an operand in place and give something else back, which one.
_REPLACED = {"gated_delta_step_": 0}
# The host waits for what the device finds; how often.
WAITS = dict.fromkeys(
    ["_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique_dim", "_unique2", "equal"]
    + ["unique_consecutive", "unique_dim_consecutive"],
    1,
)
_FLASH_BACKWARD = (
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
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


def waits_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How often the host waits for what the device finds."""
    if name == "repeat_interleave":
        # How often is known to the device alone, and with it the length of the result, unless that is given; then it is
        # asked, and whether no number is negative (ATen's Repeat.h).
        unknown = isinstance(args[1] if len(args) > 1 else args[0], torch.Tensor)
        return 2 if unknown and kwargs.get("output_size") is None else 0
    return WAITS.get(name, 0)


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
    if name == "_flash_attention_forward":
        return written + spanned_bytes(args[0]) + _keys_read(args, kwargs) + _flash_copies(args)
    if name in _FLASH_BACKWARD:
        return _flash_backward_bytes(args, outs)
    if name == "embedding_dense_backward":
        return _embedding_backward_bytes(args, outs[0])
    if name == "rotate_append":
        # Of the caches only the new keys and values; queries of pieces are written.
        (_, k, v), caches = args[:3], args[8:10]
        return written + sum(map(spanned_bytes, (*ins, k, v))) - sum(map(spanned_bytes, caches))
    if name == "own_attention":
        q, keys, _, lengths = args[:4]
        return written + sum(map(spanned_bytes, (q, lengths))) + 2 * int(lengths.sum()) * keys[0, 0].nbytes
    if name == "searchsorted":
        # A binary search in each row.
        return written + spanned_bytes(args[1]) * args[0].shape[-1].bit_length()
    if name in SCATTERS or (name in ("index_put", "_index_put_impl_") and accumulates(args, kwargs)):
        # Operands behind the first: where, and what; as much is written as is given, or as there are places.
        given = sum(map(spanned_bytes, ins[1:]))
        touched = sum(x.numel() * x.element_size() for x in ins[1:] if x.dtype == ins[0].dtype)
        if not touched:  # one number for all places; of index_fill_ a place is a row
            rows = ins[0].shape[args[1]] if name == "index_fill_" else ins[0].numel()
            touched = ins[1].numel() * ins[0].numel() // max(1, rows) * ins[0].element_size()
        adds = name in _ADDING or ("index_put" in name and accumulates(args, kwargs))
        return given + touched * (2 if adds else 1)
    return written + sum(map(spanned_bytes, ins))


def spanned_bytes(x: torch.Tensor) -> int:
    """Bytes of memory that a tensor has elements in."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


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


def _flash_copies(args: Sequence[Any]) -> int:
    """What a call of one query a head moves beside its operands: queries and output laid out by the heads that share
    keys and back, and the results of parts of the keys, in fp32."""
    splits, swapped = flash_splits(args)
    q = args[0]
    copies = (3 if args[3] is not None else 2) if swapped else 0
    parts = 2 * splits * 4 * (q.numel() + q.numel() // q.shape[-1]) if splits > 1 else 0
    return copies * 2 * int(q.nbytes) + parts


def _flash_backward_bytes(args: Sequence[Any], outs: list[torch.Tensor]) -> int:
    """Row sums: of out and its gradient; they and zeros for dq in fp32 are written. The gradients: q, k, v, the
    gradient of out, log-sum-exps and row sums are read, dq added to, dk and dv written by query head. Then dq is read
    and written in its own dtype. The sums over heads that share keys are operations of their own (``parts.py``)."""
    grad, q, k, v, out, lse = args[:6]
    wide, rows = 4 * q.numel(), lse.nbytes
    shared = _heads(q) // _heads(k)
    sums = spanned_bytes(out) + spanned_bytes(grad) + rows + wide
    gradients = sum(map(spanned_bytes, (q, k, v, grad))) + 2 * rows + 2 * wide + shared * (k.nbytes + v.nbytes)
    return sums + gradients + wide + outs[0].nbytes


def _heads(x: torch.Tensor) -> int:
    """Of [rows, heads, H] or [batch, heads, rows, H]."""
    return x.shape[1]


def _embedding_backward_bytes(args: Sequence[Any], out: torch.Tensor) -> int:
    """Zeros everywhere, then rows of gradient added where they belong; many are summed in fp32 first."""
    grad, ids = args[0], args[1]
    touched = grad.numel() * out.element_size()
    if embedding_rows(args) <= UNSORTED_ROWS:
        return out.nbytes + ids.nbytes + grad.nbytes + 2 * touched
    return out.nbytes + ids.nbytes + grad.nbytes + 2 * 4 * grad.numel() + touched


def _keys_read(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Bytes of keys and values; in a variable-length call of segments with queries, as far as they are used."""
    k, v, cu_q, cu_k = args[1:5]
    if cu_q is None:
        return spanned_bytes(k) + spanned_bytes(v)
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
    "own_attention": lambda args, _: 4 * int(args[3].sum()) * args[0][0].numel(),
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _dense(4, 0, at_end=True),
    "_scaled_dot_product_flash_attention_backward": _dense(10, 1, at_end=True),
    "_scaled_dot_product_flash_attention_for_cpu": _dense(4, 0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _dense(10, 1),
}

"""Kind, operations, bytes and CUDA kernels of one torch operation, from its name and operands.

Bytes are those of a kernel that reads each operand once and writes each result once, and keeps nothing in caches from
one kernel to the next. A gathered operand costs what is read of it. An expanded dimension is one row of memory. Kernels
are read off ATen's sources (pytorch/pytorch, aten/src/ATen/native/cuda and native/transformers/cuda); what no source
tells is one kernel. FLOPs of products are torch's own (``torch.utils.flop_counter``); of attention, whose masked pairs
torch counts too, those of the pairs that a causal mask and the real lengths leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Args = Sequence[Any]
Kwargs = dict[str, Any]

# They make another view of memory, reserve it, or ask something about a tensor: no kernel runs.
NO_KERNEL = frozenset((
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select", "detach",
    "alias", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "as_strided", "chunk", "unfold",
    "diagonal", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device",
    "is_same_size", "is_pinned", "real", "view_as_real", "resize_", "unsafe_split", "unsafe_chunk", "unsqueeze_",
    "squeeze_", "transpose_", "t_", "detach_", "view_as_complex", "promote_types", "set_", "record_stream",
    "empty_permuted", "_assert_tensor_metadata", "_conj", "_neg_view",
))  # fmt: skip
MATMUL = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "_grouped_mm", "convolution", "convolution_backward")
)
# They write and read nothing.
FILLS = frozenset((
    "fill_", "zero_", "zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like",
    "new_ones", "arange", "normal_", "uniform_", "exponential_", "bernoulli_", "random_", "rand", "randn",
    "rand_like", "randn_like", "randint",
))  # fmt: skip
# They read as many elements of their first operand as they write.
GATHERS = frozenset(("embedding", "index_select", "gather", "index"))
# They touch of their first operand only where they write; some read it there too.
SCATTERS = frozenset(("index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_"))
ADDING = frozenset(("index_add_", "scatter_add_"))
# Memory is filled with zeros first, then a part of it gets the operand.
PADDING = frozenset(("slice_backward", "select_backward", "constant_pad_nd"))
# The host waits for the result.
WAITS = frozenset((
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique_dim", "_unique2", "equal",
    "unique_consecutive",
))  # fmt: skip
FLASH_BACKWARD = (
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
# Of an H100 or H200 as SXM. It decides into how many parts a decoding call is cut.
MULTIPROCESSORS = 132
# Embedding.cu: up to so many rows of gradient need no sorting.
UNSORTED_ROWS = 3072
# Kernels of operations with more than one: copies or zeros first (Indexing.cu, Shape.cu), sums and a selection
# (Nonzero.cu), dq from its fp32 sums (flash_bwd_launch_template.h), places as sorted numbers (``index_put``, adding).
_COPIED = ("scatter", "scatter_add", "index_add", "index_copy", "slice_scatter", "select_scatter", "masked_fill")
_TWO = (*_COPIED, *PADDING, "equal", "draw_tokens", "native_layer_norm_backward", "topk", "unique_consecutive")
KERNELS = dict.fromkeys(_TWO, 2) | dict.fromkeys((*FLASH_BACKWARD, "multinomial", "nonzero", "sort"), 3)
ADDING_KERNELS, SORTED_EMBEDDING_KERNELS = 6, 16


def kind_of(name: str) -> str:
    """ "matmul", "attention" or "other"."""
    return "matmul" if name in MATMUL else "attention" if "attention" in name else "other"


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors among arguments or results; torch's own trees take ten times as long."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    entries = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for entry in entries for tensor in tensors_in(entry)]


def spanned_bytes(x: torch.Tensor) -> int:
    """Bytes of memory that a tensor has elements in."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def waits_of(name: str, args: Args, kwargs: Kwargs) -> int:
    """How often the host waits for the result."""
    if name == "repeat_interleave":
        # Unless the result's length is given the device is asked for it, and whether no number is negative (Repeat.h).
        unknown = isinstance(args[1] if len(args) > 1 else args[0], torch.Tensor)
        return 2 if unknown and kwargs.get("output_size") is None else 0
    return int(name in WAITS)


def kernels_of(name: str, args: Args, kwargs: Kwargs, out: Any) -> int:
    """How many kernels are launched."""
    if name in NO_KERNEL or ((outs := tensors_in(out)) and name not in WAITS and not any(x.numel() for x in outs)):
        return 0
    if name in ("_flash_attention_forward", "_scaled_dot_product_flash_attention"):
        splits, swapped = flash_splits(name, args)
        # What joins its parts, and copies of swapped queries and of the output.
        return 1 + (splits > 1) + (3 if name == "_flash_attention_forward" and args[3] is not None else 2) * swapped
    if "index_put" in name:
        return ADDING_KERNELS if accumulates(args, kwargs) else 1 + (name == "index_put")
    if name == "embedding_dense_backward":
        return 2 if args[1].numel() <= UNSORTED_ROWS else SORTED_EMBEDDING_KERNELS
    if name.startswith("_foreach_") and len({x.dtype for x in tensors_in(args)}) > 1:
        return len(args[0])  # one by one
    return KERNELS.get(name, 1)


def accumulates(args: Args, kwargs: Kwargs) -> bool:
    """Whether ``index_put`` adds."""
    return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))


def flash_splits(name: str, args: Args) -> tuple[int, bool]:
    """Parts of the keys, and whether heads that share keys are taken as queries (flash_api.cpp)."""
    q, k = args[:2]
    if name == "_flash_attention_forward" and args[3] is not None:
        segments, queries, keys = args[3].numel() - 1, args[5], args[6]
        heads, kv_heads = q.shape[-2], k.shape[-2]
    else:
        segments, heads, queries = q.shape[:3] if name != "_flash_attention_forward" else (q.shape[0], *q.shape[2:0:-1])
        kv_heads, keys = k.shape[1:3] if name != "_flash_attention_forward" else (k.shape[2], k.shape[1])
    swapped = queries == 1 and heads > kv_heads
    if name == "_flash_attention_forward" and args[3] is not None and not swapped:
        return 1, False  # such a call is never cut
    if swapped:
        queries, heads = heads // kv_heads, kv_heads
    return splits_of(queries, keys, segments * heads, q.shape[-1]), swapped


def splits_of(queries: int, keys: int, calls: int, head_dim: int) -> int:
    """Parts of the keys of a call of few queries (flash_api.cpp, ``num_splits_heuristic``); calls: segments x heads."""
    at_once, parts = 2 * MULTIPROCESSORS, -(-keys // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    blocks = calls * -(-queries // 64)
    if blocks >= 0.8 * at_once:
        return 1
    efficiency = {}
    for splits in range(1, min(128, at_once, parts) + 1):
        if splits == 1 or -(-parts // splits) != -(-parts // (splits - 1)):
            efficiency[splits] = blocks * splits / at_once / -(-blocks * splits // at_once)
    best = max(efficiency.values())
    return next(splits for splits, reached in efficiency.items() if reached >= 0.85 * best)


def bytes_of(name: str, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Read and written."""
    # What "out" names is written, and not read.
    ins = tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
    outs = tensors_in(out)
    written = sum(map(spanned_bytes, outs))
    if name.endswith("_") and not outs:  # a list of tensors in place gives nothing back
        written = sum(map(spanned_bytes, tensors_in(args[0])))
    if name == "gated_delta_step_":  # replaces its first operand
        written += spanned_bytes(args[0])
    if name in FILLS:
        return written
    if name in PADDING:
        return written + 2 * spanned_bytes(ins[0])
    if name in GATHERS:
        return 2 * written + sum(spanned_bytes(x) for x in ins if not x.dtype.is_floating_point)
    if name == "copy_":
        return written + spanned_bytes(ins[1])
    if name == "_flash_attention_forward":
        return written + _flash_forward_bytes(name, args, kwargs)
    if name in FLASH_BACKWARD:
        return _flash_backward_bytes(args, outs)
    if name == "embedding_dense_backward":
        # Zeros, then rows of gradient added where they belong; many are summed in fp32 first.
        sums = 2 * args[0].numel() * (outs[0].element_size() if args[1].numel() <= UNSORTED_ROWS else 6)
        return written + spanned_bytes(args[0]) + spanned_bytes(args[1]) + sums
    if name == "rotate_append":
        # Of the caches only the new keys and values; queries of pieces are written.
        (_, k, v), caches = args[:3], args[8:10]
        return written + sum(map(spanned_bytes, (*ins, k, v))) - sum(map(spanned_bytes, caches))
    if name == "own_attention":
        q, keys, _, lengths = args[:4]
        return written + sum(map(spanned_bytes, (q, lengths))) + 2 * int(lengths.sum()) * keys[0, 0].nbytes
    if name in SCATTERS or ("index_put" in name and accumulates(args, kwargs)):
        # Operands behind the first: positions, and values; as much is written as is given.
        touched = sum(x.numel() * x.element_size() for x in ins[1:] if x.dtype == ins[0].dtype)
        adds = name in ADDING or ("index_put" in name and accumulates(args, kwargs))
        return sum(map(spanned_bytes, ins[1:])) + touched * (2 if adds else 1)
    return written + sum(map(spanned_bytes, ins))


def _flash_forward_bytes(name: str, args: Args, kwargs: Kwargs) -> int:
    """Queries; keys and values of segments with queries, as far as they are used; of a call of one query a head copies
    of queries and output by the heads that share keys, and the results of parts of the keys in fp32."""
    q, k, v, cu_q, cu_k = args[:5]
    if cu_q is None:
        keys = spanned_bytes(k) + spanned_bytes(v)
    else:
        used = kwargs.get("seqused_k")
        lengths = zip(cu_q.diff().tolist(), (cu_k.diff() if used is None else used).tolist(), strict=True)
        keys = sum(count for queries, count in lengths if queries) * (k[0].nbytes + v[0].nbytes)
    splits, swapped = flash_splits(name, args)
    copies = (3 if cu_q is not None else 2) if swapped else 0
    parts = 2 * splits * 4 * (q.numel() + q.numel() // q.shape[-1]) if splits > 1 else 0
    return spanned_bytes(q) + keys + copies * 2 * int(q.nbytes) + parts


def _flash_backward_bytes(args: Args, outs: list[torch.Tensor]) -> int:
    """Row sums: of out and its gradient; they and zeros for dq in fp32 are written. The gradients: q, k, v, the
    gradient of out, log-sum-exps and row sums are read, dq added to, dk and dv written by query head. Then dq is read
    and written in its own dtype. The sums over heads that share keys are operations of their own (``counting.py``)."""
    grad, q, k, v, out, lse = args[:6]
    wide, rows, shared = 4 * q.numel(), lse.nbytes, q.shape[1] // k.shape[1]
    sums = spanned_bytes(out) + spanned_bytes(grad) + rows + wide
    gradients = sum(map(spanned_bytes, (q, k, v, grad))) + 2 * rows + 2 * wide + shared * (k.nbytes + v.nbytes)
    return sums + gradients + wide + outs[0].nbytes


def flops_of(func: Any, name: str, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Of products of matrices, convolutions and attention; the rest is bound by memory, and counts as none."""
    if "attention" in name:
        return _attention_flops(name, args, kwargs)
    if name in ("mv", "dot"):
        return 2 * int(args[0].numel())
    if name == "linear":
        return 2 * int(args[0].numel()) * int(args[1].shape[0])
    if name == "_grouped_mm":
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    count = flop_registry.get(func.overloadpacket) if name in MATMUL else None
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _attention_flops(name: str, args: Args, kwargs: Kwargs) -> int:
    """Forward 2 products a pair, backward 5 (it computes the scores again)."""
    if name == "own_attention":
        return 4 * int(args[3].sum()) * int(args[0][0].numel())
    backward = name.endswith("_backward")
    each, (q, k) = (10, args[1:3]) if backward else (4, args[:2])
    if name.startswith("_flash"):
        cu_q, cu_k, causal = (args[6], args[7], args[11]) if backward else (*args[3:5], (*args, *kwargs.values())[8])
        if cu_q is not None:
            used = kwargs.get("seqused_k")
            lengths = zip(cu_q.diff().tolist(), (cu_k.diff() if used is None else used).tolist(), strict=True)
            pairs = sum(_pairs(queries, keys, causal, at_end=True) for queries, keys in lengths)
            return each * pairs * int(q.shape[-2]) * int(q.shape[-1])
        return each * q.shape[0] * _pairs(q.shape[1], k.shape[1], causal, at_end=True) * q.shape[-2] * q.shape[-1]
    if "flash" not in name:
        return 0
    causal = next((value for value in args if isinstance(value, bool)), kwargs.get("is_causal", False))
    pairs = _pairs(q.shape[2], k.shape[2], causal, at_end="for_cpu" not in name)
    return each * int(q.shape[0] * q.shape[1]) * pairs * int(q.shape[3])


def _pairs(queries: int, keys: int, causal: bool, at_end: bool) -> int:
    """``at_end``: the last query sees the last key, as in FlashAttention-2; else the first one the first key."""
    if not causal:
        return queries * keys
    short = min(queries, keys)
    return short * (short + 1) // 2 + ((keys if at_end else queries) - short) * short

"""How many kernels one of torch's operations is on CUDA, from its name and operands.

Read off ATen's sources (pytorch/pytorch, aten/src/ATen/native/cuda and native/transformers/cuda, the files named below)
and what CUB's device algorithms launch, on which they stand; nothing of it was measured. Only kernels count: clearing a
buffer of a library's own (``cudaMemsetAsync``) is none. What no source tells is taken as one kernel: a product that
cuBLAS cuts along its sum has a second one, and a convolution may change its layout first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Args = Sequence[Any]
Kwargs = dict[str, Any]

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
        "set_",
        "record_stream",
        "empty_permuted",
        "_assert_tensor_metadata",
        "_conj",
        "_neg_view",
    ]
)
# Of an H100 or H200 as SXM; an A100 has 108, an RTX 4090 128. It decides into how many parts a decoding call is cut.
MULTIPROCESSORS = 132
# Embedding.cu: up to so many rows of gradient need no sorting.
UNSORTED_ROWS = 3072
# CUB, dispatch_radix_sort: one block sorts up to 256 threads x 9 pairs of 8 bytes each; else a histogram, its sum, and
# a pass for every 8 bits.
_ONE_BLOCK_PAIRS, _BITS_A_PASS = 2304, 8
# CUB, dispatch_reduce: one block sums up to 256 threads x 16 numbers.
_ONE_BLOCK_SUM = 4096
# CUB: a scan, a selection or a unique one is a kernel that clears its tiles' states and the one that does it.
_SCAN = _SELECT = 2
# Sort.cu: rows of up to so many are sorted by one kernel, after a copy of the values and the numbers of their places.
_SMALL_ROW = 4096
# Shape.cu: so many tensors are joined by one kernel.
_JOINED = 128
# ForeachFunctors and MultiTensorApply.cuh: elements of a chunk, chunks of a launch, tensors of a launch by lists.
_CHUNK, _CHUNKS, _TENSORS = 65536, 320, {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


# They run to find out that there is nothing.
_FINDING = frozenset(("nonzero", "masked_select", "repeat_interleave", "unique_consecutive"))


def kernels_of(name: str, args: Args, kwargs: Kwargs, out: Any = None) -> int:
    """How many kernels are launched."""
    if name in NO_KERNEL:
        return 0
    outs = tensors_in(out)
    if outs and name not in _FINDING and not any(x.numel() for x in outs):
        return 0
    if name.startswith(("_foreach_", "_fused_adam")):
        return _many(name, args)
    count = _KERNELS.get(name, 1)
    return count if isinstance(count, int) else count(args, kwargs)


def sort_passes(bits: int) -> int:
    """Over all pairs, of numbers that so many bits tell apart."""
    return max(1, -(-bits // _BITS_A_PASS))


def sort_pairs(count: int, bits: int) -> int:
    """CUB's sorting of ``count`` pairs of numbers of 8 bytes by their last ``bits``."""
    return 1 if count <= _ONE_BLOCK_PAIRS else 2 + sort_passes(bits)


def nonzero_kernels(x: torch.Tensor) -> int:
    """Nonzero.cu: a sum, a selection, and where there are several axes the places on each of them."""
    return (1 if x.numel() <= _ONE_BLOCK_SUM else 2) + _SELECT + (x.dim() > 1)


def splits_of(queries: int, keys: int, calls: int, head_dim: int) -> int:
    """Parts that the keys of a call of few queries are cut into (flash_api.cpp, ``num_splits_heuristic``).

    Args:
        queries: of a head; heads that share keys count as queries where there is one query.
        keys: the most of a segment.
        calls: segments times heads.
        head_dim: H.
    """
    at_once, parts = 2 * MULTIPROCESSORS, -(-keys // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    blocks = calls * -(-queries // 64)
    if blocks >= 0.8 * at_once:
        return 1
    efficiency = {}
    for splits in range(1, min(128, at_once, parts) + 1):
        if splits == 1 or -(-parts // splits) != -(-parts // (splits - 1)):
            waves = blocks * splits / at_once
            efficiency[splits] = waves / -(-blocks * splits // at_once)
    best = max(efficiency.values())
    return next(splits for splits, reached in efficiency.items() if reached >= 0.85 * best)


def flash_splits(args: Args) -> tuple[int, bool]:
    """Of ``_flash_attention_forward``: parts of the keys, and whether heads that share keys are taken as queries."""
    q, k, cu_q = args[0], args[1], args[3]
    varlen = cu_q is not None
    heads, kv_heads, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    segments, queries, keys = (cu_q.numel() - 1, args[5], args[6]) if varlen else (q.shape[0], q.shape[1], k.shape[1])
    swapped = queries == 1 and heads > kv_heads
    if varlen and not swapped:  # such a call is never cut
        return 1, False
    if swapped:
        queries, heads = heads // kv_heads, kv_heads
    return splits_of(queries, keys, segments * heads, head_dim), swapped


def _flash_forward(args: Args, kwargs: Kwargs) -> int:
    """The kernel, what joins its parts, and copies: of swapped queries there (if they lie unpadded), and of them and of
    the output back."""
    splits, swapped = flash_splits(args)
    copies = (3 if args[3] is not None else 2) if swapped else 0
    return 1 + (splits > 1) + copies


def _dense_flash(args: Args, kwargs: Kwargs) -> int:
    """The same through ``scaled_dot_product_attention``: [batch, heads, rows, H]."""
    q, k = (x.transpose(1, 2) for x in args[:2])
    return _flash_forward((q, k, None, None, None, q.shape[1], k.shape[1]), kwargs)


def _repeat_interleave(args: Args, kwargs: Kwargs) -> int:
    """Repeat.h: running sums and one kernel; without the result's length also a comparison and whether all hold."""
    if not _repeats_unknown(args):
        return 1
    return _SCAN + 1 + (0 if kwargs.get("output_size") is not None else 2)


def _repeats_unknown(args: Args) -> bool:
    return len(args) == 1 or isinstance(args[1], torch.Tensor)


def _index_put(args: Args, kwargs: Kwargs) -> int:
    """Indexing.cu, ``index_put_with_sort_kernel``: places as one number each (a remainder and a product for every index
    and their sums), divided by the size of a slice, their numbers, sorted; then one kernel.

    With the check of bounds that only indexing by hand makes: smallest and largest, compared, held against the bounds.
    """
    if not accumulates(args, kwargs):
        return 1
    indices = [index for index in args[1] if index is not None]
    prepared = 3 * len(indices) - 1 + 2
    return prepared + sort_pairs(*_places(args[0], indices)) + 1


def _index_put_by_hand(args: Args, kwargs: Kwargs) -> int:
    checks = 6 * sum(index is not None for index in args[1]) if accumulates(args, kwargs) else 0
    return _index_put(args, kwargs) + checks


def _index_put_copy(args: Args, kwargs: Kwargs) -> int:
    """Not in place: after a copy. Autograd's own, which adds, is in place wherever nobody watches its operations."""
    return _index_put(args, kwargs) + (not accumulates(args, kwargs))


def accumulates(args: Args, kwargs: Kwargs) -> bool:
    """Whether ``index_put`` adds."""
    return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))


def _places(x: torch.Tensor, indices: Sequence[torch.Tensor]) -> tuple[int, int]:
    """How many places are named, and bits of the largest."""
    known = 1
    for size in x.shape[: len(indices)]:
        known *= size
    named = torch.broadcast_shapes(*(index.shape for index in indices))
    return torch.Size(named).numel(), max(1, (known - 1).bit_length())


def embedding_rows(args: Args) -> int:
    """Rows of gradient of ``embedding_dense_backward``."""
    return int(args[1].numel())


def _embedding_backward(args: Args, kwargs: Kwargs) -> int:
    """Embedding.cu: zeros and one kernel; of many rows (EmbeddingBackwardKernel.cu) their numbers, sorted by token,
    zeros, which tokens there are, their parts of up to ten rows (counted, their running sum, the sum of all, where each
    begins), the sums of parts, and the sums of these."""
    rows, tokens = embedding_rows(args), args[2]
    if rows <= UNSORTED_ROWS:
        return 2
    return 1 + sort_pairs(rows, max(1, int(tokens).bit_length())) + 1 + _SELECT + (1 + _SCAN + 1 + 1) + 2


def _cumulative(args: Args, kwargs: Kwargs) -> int:
    """ScanUtils.cuh: a tensor of one axis by CUB, others by one kernel over rows."""
    return _SCAN if args[0].numel() == args[0].shape[args[1]] else 1


def _sort(args: Args, kwargs: Kwargs) -> int:
    x, dims = args[0], [value for value in (*args[1:], kwargs.get("dim")) if type(value) is int]
    row = x.shape[dims[0] if dims else -1]
    # Longer ones: their places' numbers, then by every bit.
    return 3 if row <= _SMALL_ROW else 1 + 2 + sort_passes(8 * x.element_size())


def _cat(args: Args, kwargs: Kwargs) -> int:
    return -(-sum(x.numel() > 0 for x in args[0]) // _JOINED)


def _many(name: str, args: Args) -> int:
    """MultiTensorApply.cuh: chunk after chunk, until a launch has no room for a further one; tensors of several dtypes
    (ForeachUtils.h) one by one."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and tensors_in(value)]
    if any(len({x.dtype for x in of_one}) > 1 for of_one in zip(*map(tensors_in, lists), strict=False)):
        return sum(x.numel() > 0 for x in lists[0])
    depth = 4 if name.startswith("_fused") else len(lists) + (not name.endswith("_"))
    most = _TENSORS[min(max(depth, 1), 5)]
    launches = chunks = tensors = 0
    for x in tensors_in(lists[0]):
        left = -(-x.numel() // _CHUNK)
        tensors += left > 0
        while left:
            taken = min(left, _CHUNKS - chunks)
            left, chunks = left - taken, chunks + taken
            if chunks == _CHUNKS or (tensors == most and not left):
                launches, chunks, tensors = launches + 1, 0, int(left > 0)
    return launches + (chunks > 0)


# Out of place: a copy first.
_COPIED = ("scatter", "scatter_add", "index_add", "index_copy", "slice_scatter", "select_scatter", "masked_fill")
# Memory is filled with zeros first, then a part of it gets what is given.
_PADDED = ("slice_backward", "select_backward", "constant_pad_nd")
# flash_bwd_launch_template.h: row sums of out * grad_out, the gradients, and dq from the sums in fp32.
_FLASH_BACKWARD = (
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_KERNELS: dict[str, int | Callable[[Args, Kwargs], int]] = {
    **dict.fromkeys(_COPIED, 2),
    **dict.fromkeys(_PADDED, 2),
    **dict.fromkeys(_FLASH_BACKWARD, 3),
    "_flash_attention_forward": _flash_forward,
    "_scaled_dot_product_flash_attention": _dense_flash,
    "_scaled_dot_product_flash_attention_for_cpu": _dense_flash,
    "cat": _cat,
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    # Of ours: sums of runs, and a run of each row.
    "draw_tokens": 2,
    "embedding_dense_backward": _embedding_backward,
    # A comparison, and whether all hold.
    "equal": 2,
    "index_put": _index_put_copy,
    "index_put_": _index_put_by_hand,
    "_index_put_impl_": _index_put,
    # Places, then one kernel.
    "masked_select": lambda args, _: nonzero_kernels(args[1]) + 1,
    # Random numbers, the quotient, its largest; the least of all ways.
    "multinomial": 3,
    # layer_norm_kernel.cu: gradients of the input, and of weight and bias.
    "native_layer_norm_backward": 2,
    "nonzero": lambda args, _: nonzero_kernels(args[0]),
    "repeat_interleave": _repeat_interleave,
    "sort": _sort,
    # TensorTopK.cu: the largest and their order; of long rows the search is several, so this is the least.
    "topk": 2,
    "unique_consecutive": _SELECT,
}


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

"""Kernels on torch's own operators: flash attention for CPUs and for CUDA (bf16, fp16), memory-efficient attention.

The operators' schemas of torch 2.11 and 2.15 agree in all arguments used here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlm_pg.attention.kernels.base import Bounds, FlashKernel, Grads, Kernel, OutLse, row_bounds
from vlm_pg.attention.tree import SegmentBatch, SegmentCall

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(rows: Tensor, index: slice | Tensor, count: int) -> Tensor:
    """[rows, heads, H] -> [count, heads, length, H], a view where ``index`` is a slice."""
    return rows[index].unflatten(0, (count, -1)).transpose(1, 2)


def _rows_first(batch: Tensor) -> Tensor:
    """[count, heads, length, H] -> [count * length, heads, H]."""
    return batch.transpose(1, 2).flatten(0, 1)


class CpuFlashKernel(Kernel):
    """Segments of one shape go through one dense call; long segments are views, not copies. Grouped-query heads."""

    name = "cpu-flash"

    @classmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"it runs on CPUs, the tensors are on {device.type}"
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"dtype {dtype} is not floating point"
        return None

    def segments_forward(self, q: Tensor, k: Tensor, v: Tensor, call: SegmentCall, scale: float) -> OutLse:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for batch in call.same_shape_batches():
            queries, keys, values = _operands(q, k, v, batch)
            part, part_lse = _forward(queries, keys, values, 0.0, call.causal, scale=scale)
            out[batch.query_index] = _rows_first(part)
            lse[:, batch.query_index] = part_lse.transpose(0, 1).flatten(1).to(lse.dtype)
        return out, lse

    def segments_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: SegmentCall, scale: float
    ) -> Grads:
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if not all(call.query_lengths):
            # Keys without queries get no gradient; all others are overwritten below.
            grad_k.zero_(), grad_v.zero_()
        for batch in call.same_shape_batches():
            queries, keys, values = _operands(q, k, v, batch)
            part_lse = lse[:, batch.query_index].unflatten(1, (batch.count, -1)).transpose(0, 1).contiguous()
            upstream, outs = (_heads_first(x, batch.query_index, batch.count) for x in (grad, out))
            parts = _backward(upstream, queries, keys, values, outs, part_lse, 0.0, call.causal, scale=scale)
            grad_q[batch.query_index] = _rows_first(parts[0])
            grad_k[batch.key_index] = _rows_first(parts[1])
            grad_v[batch.key_index] = _rows_first(parts[2])
        return grad_q, grad_k, grad_v

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
        out, lse = _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, False, scale=scale)
        return out.transpose(1, 2), lse

    def ragged_forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> OutLse:
        hidden = torch.arange(k.shape[1]) >= lengths[:, None, None, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        out, lse = _forward(
            q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), 0.0, False, attn_mask=mask, scale=scale
        )
        return out[:, :, 0], lse[:, :, 0].transpose(0, 1)


def _operands(q: Tensor, k: Tensor, v: Tensor, batch: SegmentBatch) -> Grads:
    return (
        _heads_first(q, batch.query_index, batch.count),
        _heads_first(k, batch.key_index, batch.count),
        _heads_first(v, batch.key_index, batch.count),
    )


class CudaFlashKernel(FlashKernel):
    """torch's own FlashAttention-2."""

    name = "cuda-flash"
    least_max_query = 2

    @classmethod
    def unsupported_on(cls, capability: tuple[int, int]) -> str | None:
        if capability < (8, 0):
            return "flash attention needs compute capability 8.0 (Ampere) or newer"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without flash attention"
        return None

    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool, used_k: Tensor | None = None
    ) -> OutLse:
        used = {} if used_k is None else {"seqused_k": used_k}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, causal, False, scale=scale, **used
        )
        if lse.shape != (q.shape[1], q.shape[0]):
            raise RuntimeError(
                f"torch {torch.__version__} returned a log-sum-exp of shape {tuple(lse.shape)}, not [heads, rows] = "
                f"{(q.shape[1], q.shape[0])}. Use a torch version that pyproject.toml allows."
            )
        return out, lse

    def segments_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: SegmentCall, scale: float
    ) -> Grads:
        # Without dropout no random state is read, but the operator requires the tensors.
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        lse = lse.contiguous()  # read by pointer, whatever its strides
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self.bounds(q, call), 0.0, call.causal, random_state, unused, scale=scale
        )

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
        self.check_head_dim(q)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale
        )
        return out, lse[:, :, : q.shape[1]]


# The operator's log-sum-exp is [segments, N, longest query rounded up to this many rows].
_LSE_ROWS = 32
_CAUSAL_TOP_LEFT = 1


class CudaEfficientKernel(Kernel):
    """fp32 on CUDA, for numerics; GPUs before Ampere. Its operator has no grouped-query heads: they are repeated."""

    name = "cuda-efficient"

    @classmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA devices, the tensors are on {device.type}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"efficient attention takes fp32, bf16 or fp16, not {dtype}"
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            return "efficient attention in bf16 needs compute capability 8.0 (Ampere) or newer"
        return None

    def segments_forward(self, q: Tensor, k: Tensor, v: Tensor, call: SegmentCall, scale: float) -> OutLse:
        keys, values = (_repeat_heads(x, q.shape[1])[None] for x in (k, v))
        bounds, causal = _bounds(call, q.device)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None], keys, values, None, *bounds, 0.0, causal, True, scale=scale
        )
        # [segments, N, padded length] -> [N, rows].
        return out[0], lse.transpose(0, 1).flatten(1)[:, _padded_rows(q.shape[0], bounds[0], call)]

    def segments_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: SegmentCall, scale: float
    ) -> Grads:
        keys, values = (_repeat_heads(x, q.shape[1])[None] for x in (k, v))
        bounds, causal = _bounds(call, q.device)
        random_state = (torch.empty((), dtype=torch.int64, device=q.device),) * 2
        out = out.contiguous()  # the operator takes its row stride to be N * H
        padded = _pad(lse, bounds[0], call)
        grad_q, *grads, _ = torch.ops.aten._efficient_attention_backward(
            grad[None], q[None], keys, values, None, out[None], *bounds, padded, 0.0, *random_state, causal, False,
            scale=scale,
        )  # fmt: skip
        grad_k, grad_v = (x[0].unflatten(1, (k.shape[1], -1)).sum(2) for x in grads)
        return grad_q[0], grad_k, grad_v

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
        keys, values = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, keys, values, None, None, None, None, None, 0.0, 0, True, scale=scale
        )
        return out, lse[:, :, : q.shape[1]]

    def ragged_forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> OutLse:
        rows, capacity, kv_heads, _ = k.shape
        repeats = q.shape[1] // kv_heads
        # The query heads of one key-value head become queries of one segment: its keys are read once, not repeated.
        folded = q.unflatten(1, (kv_heads, repeats)).transpose(1, 2).flatten(0, 1)
        keys, values = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
        bounds = row_bounds(rows, repeats, q.device), row_bounds(rows, capacity, q.device), repeats, capacity
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            folded[None], keys, values, None, *bounds, 0.0, 0, True, scale=scale, seqlen_k=lengths
        )
        out = out[0].unflatten(0, (rows, repeats)).transpose(1, 2).flatten(1, 2)
        return out, lse[:, :, :repeats].flatten(1).transpose(0, 1)


def _bounds(call: SegmentCall, device: torch.device) -> tuple[Bounds, int]:
    """Cumulative and longest lengths of queries and keys, and the operator's name of the mask."""
    cu_q, cu_k = call.cu_seqlens(device)
    return (cu_q, cu_k, call.max_query_length, call.max_key_length), _CAUSAL_TOP_LEFT if call.causal else 0


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[..., K, H] -> [..., N, H], each head N / K times in a row."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], heads // x.shape[-2], x.shape[-1]).flatten(-3, -2)


def _padded_rows(rows: int, cu_q: Tensor, call: SegmentCall) -> Tensor:
    """Row of each query in [segments * padded length], int64 [rows]; undefined behind the last segment.

    Computed once per call and not once per layer, unless lengths on the device may change (``at_most``).
    """
    known, key = call._on_device, ("padded rows", cu_q.device)
    if call.at_most is None and key in known:
        return known[key]
    row = torch.arange(rows, dtype=cu_q.dtype, device=cu_q.device)
    segment = torch.searchsorted(cu_q[1:-1], row, right=True)
    found = segment * _padded_length(call) + row - cu_q[segment]
    found.clamp_(max=(len(cu_q) - 1) * _padded_length(call) - 1)
    if call.at_most is None:
        known[key] = found
    return found


def _padded_length(call: SegmentCall) -> int:
    return -(-call.max_query_length // _LSE_ROWS) * _LSE_ROWS


def _pad(lse: Tensor, cu_q: Tensor, call: SegmentCall) -> Tensor:
    """[N, rows] -> [segments, N, padded length]; infinity in the padding makes probabilities of no query 0."""
    segments = len(cu_q) - 1
    padded = lse.new_full((lse.shape[0], segments * _padded_length(call)), torch.inf)
    padded[:, _padded_rows(lse.shape[1], cu_q, call)] = lse
    return padded.unflatten(1, (segments, -1)).transpose(0, 1).contiguous()

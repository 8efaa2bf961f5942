"""Kernels on torch's own operators: flash attention for CPUs and for CUDA (bf16, fp16), memory-efficient attention.

The operators' schemas of torch 2.11 and 2.15 agree in all arguments used here.
"""

from __future__ import annotations

from typing import Any

import torch

from vlm_pg.attention.kernels.base import Kernel, check_head_dim, row_bounds
from vlm_pg.attention.tree import SegmentBatch, SegmentCall

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(rows: torch.Tensor, index: slice | torch.Tensor, count: int) -> torch.Tensor:
    """[rows, heads, H] -> [count, heads, length, H], a view where ``index`` is a slice."""
    return rows[index].unflatten(0, (count, -1)).transpose(1, 2)


def _rows_first(batch: torch.Tensor) -> torch.Tensor:
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

    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for batch in call.same_shape_batches():
            queries, keys, values = _operands(q, k, v, batch)
            part, part_lse = _forward(queries, keys, values, 0.0, call.causal, scale=scale)
            out[batch.query_index] = _rows_first(part)
            lse[:, batch.query_index] = part_lse.transpose(0, 1).flatten(1).to(lse.dtype)
        return out, lse

    def segments_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: SegmentCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if not all(call.query_lengths):
            # Keys without queries get no gradient; all others are overwritten below.
            grad_k.zero_(), grad_v.zero_()
        for batch in call.same_shape_batches():
            queries, keys, values = _operands(q, k, v, batch)
            part_lse = lse[:, batch.query_index].unflatten(1, (batch.count, -1)).transpose(0, 1).contiguous()
            upstream, outs = (_heads_first(x, batch.query_index, batch.count) for x in (grad_out, out))
            parts = _backward(upstream, queries, keys, values, outs, part_lse, 0.0, call.causal, scale=scale)
            grad_q[batch.query_index] = _rows_first(parts[0])
            grad_k[batch.key_index] = _rows_first(parts[1])
            grad_v[batch.key_index] = _rows_first(parts[2])
        return grad_q, grad_k, grad_v

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, False, scale=scale)
        return out.transpose(1, 2), lse

    def ragged_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.arange(k.shape[1]) >= lengths[:, None, None, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        out, lse = _forward(
            q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), 0.0, False, attn_mask=mask, scale=scale
        )
        return out[:, :, 0], lse[:, :, 0].transpose(0, 1)


def _operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: SegmentBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _heads_first(q, batch.query_index, batch.count),
        _heads_first(k, batch.key_index, batch.count),
        _heads_first(v, batch.key_index, batch.count),
    )


# With a longest query of one token the operator reshapes q to [segments, ...], which fails when another segment has no
# query. The maximum only sizes the launch; the lengths come from the cumulative sums.
_LEAST_MAX_QUERY = 2


class CudaFlashKernel(Kernel):
    """Cumulative lengths: no padding, no loop over groups, native grouped-query heads.

    The log-sum-exp of a variable-length call is fp32 [N, rows]; a segment without queries gets zero gradients for its
    keys and values.
    """

    name = "cuda-flash"

    @classmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA devices, the tensors are on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash attention takes bf16 or fp16, not {dtype}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "flash attention needs compute capability 8.0 (Ampere) or newer"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without flash attention"
        return None

    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cu_q, cu_k = call.cu_seqlens(q.device)
        max_q = max(_LEAST_MAX_QUERY, call.max_query_length)
        return self._varlen(q, k, v, cu_q, cu_k, max_q, call.max_key_length, 0.0, call.causal, False, scale=scale)

    def ragged_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, capacity = k.shape[:2]
        cu_q, cu_k = row_bounds(rows, 1, q.device), row_bounds(rows, capacity, q.device)
        # Every segment has its one query here, so the operator's own way of decoding is wanted.
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        return self._varlen(q, k, v, cu_q, cu_k, 1, capacity, 0.0, False, False, scale=scale, seqused_k=lengths)

    def _varlen(self, q: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        check_head_dim(q, self.name)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, *args, **options)
        if lse.shape != (q.shape[1], q.shape[0]):
            raise RuntimeError(
                f"torch {torch.__version__} returned a log-sum-exp of shape {tuple(lse.shape)}, not [heads, rows] = "
                f"{(q.shape[1], q.shape[0])}. Use a torch version that pyproject.toml allows."
            )
        return out, lse

    def segments_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: SegmentCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cu_q, cu_k = call.cu_seqlens(q.device)
        bounds = cu_q, cu_k, max(_LEAST_MAX_QUERY, call.max_query_length), call.max_key_length
        # Without dropout no random state is read, but the operator requires the tensors.
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        lse = lse.contiguous()  # read by pointer, whatever its strides
        return torch.ops.aten._flash_attention_backward(
            grad_out, q, k, v, out, lse, *bounds, 0.0, call.causal, random_state, unused, scale=scale
        )

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_head_dim(q, self.name)
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

    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        repeats = q.shape[1] // k.shape[1]
        keys, values = (_repeat_heads(x, repeats)[None] for x in (k, v))
        bounds, causal = _bounds(call, q.device)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None], keys, values, None, *bounds, 0.0, causal, True, scale=scale
        )
        return out[0], _unpad(lse, q.shape[0], bounds[0], call)

    def segments_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: SegmentCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv_heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
        keys, values = (_repeat_heads(x, repeats)[None] for x in (k, v))
        bounds, causal = _bounds(call, q.device)
        random_state = (torch.empty((), dtype=torch.int64, device=q.device),) * 2
        out = out.contiguous()  # the operator takes its row stride to be N * H
        padded = _pad(lse, bounds[0], call)
        grad_q, *grads, _ = torch.ops.aten._efficient_attention_backward(
            grad_out[None], q[None], keys, values, None, out[None], *bounds, padded, 0.0, *random_state, causal, False,
            scale=scale,
        )  # fmt: skip
        grad_k, grad_v = (grad[0].unflatten(1, (kv_heads, repeats)).sum(2) for grad in grads)
        return grad_q[0], grad_k, grad_v

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        repeats = q.shape[2] // k.shape[2]
        keys, values = _repeat_heads(k, repeats), _repeat_heads(v, repeats)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, keys, values, None, None, None, None, None, 0.0, 0, True, scale=scale
        )
        return out, lse[:, :, : q.shape[1]]

    def ragged_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


def _bounds(call: SegmentCall, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor, int, int], int]:
    """Cumulative and longest lengths of queries and keys, and the operator's name of the mask."""
    cu_q, cu_k = call.cu_seqlens(device)
    return (cu_q, cu_k, call.max_query_length, call.max_key_length), _CAUSAL_TOP_LEFT if call.causal else 0


def _repeat_heads(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """[..., K, H] -> [..., K * repeats, H], each head ``repeats`` times in a row."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], repeats, x.shape[-1]).flatten(-3, -2)


def _padded_rows(rows: int, cu_q: torch.Tensor, call: SegmentCall) -> torch.Tensor:
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


def _unpad(lse: torch.Tensor, rows: int, cu_q: torch.Tensor, call: SegmentCall) -> torch.Tensor:
    """Log-sum-exp [segments, N, padded length] -> [N, rows]."""
    return lse.transpose(0, 1).flatten(1)[:, _padded_rows(rows, cu_q, call)]


def _pad(lse: torch.Tensor, cu_q: torch.Tensor, call: SegmentCall) -> torch.Tensor:
    """[N, rows] -> [segments, N, padded length]; infinity in the padding makes probabilities of no query 0."""
    segments = len(cu_q) - 1
    padded = lse.new_full((lse.shape[0], segments * _padded_length(call)), torch.inf)
    padded[:, _padded_rows(lse.shape[1], cu_q, call)] = lse
    return padded.unflatten(1, (segments, -1)).transpose(0, 1).contiguous()

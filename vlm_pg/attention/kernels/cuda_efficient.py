"""torch's memory-efficient attention: fp32 on CUDA, for numerics and for GPUs before Ampere."""

from __future__ import annotations

import torch

from vlm_pg.attention.kernels.base import Kernel, row_bounds
from vlm_pg.attention.segments import SegmentCall

# The operator's log-sum-exp is [segments, N, longest query rounded up to this many rows].
_LSE_ROWS = 32
_CAUSAL_TOP_LEFT = 1


class CudaEfficientKernel(Kernel):
    """No grouped-query heads in the operator: key-value heads are repeated for it."""

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
        cu_q, cu_k = call.cu_seqlens(q.device)
        repeats = q.shape[1] // k.shape[1]
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None],
            _repeat_heads(k, repeats)[None],
            _repeat_heads(v, repeats)[None],
            None,
            cu_q,
            cu_k,
            call.max_query_length,
            call.max_key_length,
            0.0,
            _CAUSAL_TOP_LEFT if call.causal else 0,
            True,
            scale=scale,
        )
        return out[0], _unpad(lse, q.shape[0], cu_q, call)

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
        kv_heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
        nothing = torch.empty((), dtype=torch.int64, device=q.device)
        grad_q, grad_k, grad_v, _ = torch.ops.aten._efficient_attention_backward(
            grad_out[None],
            q[None],
            _repeat_heads(k, repeats)[None],
            _repeat_heads(v, repeats)[None],
            None,
            out.contiguous()[None],  # its row stride is taken to be N * H
            cu_q,
            cu_k,
            call.max_query_length,
            call.max_key_length,
            _pad(lse, cu_q, call),
            0.0,
            nothing,
            nothing,
            _CAUSAL_TOP_LEFT if call.causal else 0,
            False,
            scale=scale,
        )
        grad_k, grad_v = (grad[0].unflatten(1, (kv_heads, repeats)).sum(2) for grad in (grad_k, grad_v))
        return grad_q[0], grad_k, grad_v

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        repeats = q.shape[2] // k.shape[2]
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q,
            _repeat_heads(k, repeats),
            _repeat_heads(v, repeats),
            None,
            None,
            None,
            None,
            None,
            0.0,
            0,
            True,
            scale=scale,
        )
        return out, lse[:, :, : q.shape[1]]

    def ragged_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, capacity, kv_heads, _ = k.shape
        repeats = q.shape[1] // kv_heads
        # The query heads of one key-value head become queries of one segment: its keys are read once, not repeated.
        folded = q.unflatten(1, (kv_heads, repeats)).transpose(1, 2).flatten(0, 1)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            folded[None],
            k.flatten(0, 1)[None],
            v.flatten(0, 1)[None],
            None,
            row_bounds(rows, repeats, q.device),
            row_bounds(rows, capacity, q.device),
            repeats,
            capacity,
            0.0,
            0,
            True,
            scale=scale,
            seqlen_k=lengths,
        )
        out = out[0].unflatten(0, (rows, repeats)).transpose(1, 2).flatten(1, 2)
        return out, lse[:, :, :repeats].flatten(1).transpose(0, 1)


def _repeat_heads(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """[..., K, H] -> [..., K * repeats, H], each head ``repeats`` times in a row."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], repeats, x.shape[-1]).flatten(-3, -2)


def _padded_rows(rows: int, cu_q: torch.Tensor, call: SegmentCall) -> torch.Tensor:
    """Row of each query in [segments * padded length], int64 [rows]; those behind the last segment are anywhere.

    Found once per call and not once per layer, unless lengths on the device may change (``at_most``).
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

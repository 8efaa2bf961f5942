"""The CPU kernel: torch's own flash attention for CPUs, which takes grouped-query heads as they are."""

from __future__ import annotations

import torch

from vlm_pg.attention.kernels.base import Kernel
from vlm_pg.attention.segments import SegmentBatch, SegmentCall

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(rows: torch.Tensor, index: slice | torch.Tensor, count: int) -> torch.Tensor:
    """[rows, heads, H] -> [count, heads, length, H], a view where ``index`` is a slice."""
    return rows[index].unflatten(0, (count, -1)).transpose(1, 2)


def _rows_first(batch: torch.Tensor) -> torch.Tensor:
    """[count, heads, length, H] -> [count * length, heads, H]."""
    return batch.transpose(1, 2).flatten(0, 1)


class CpuFlashKernel(Kernel):
    """Segments of one shape go through one dense call; long segments lie alone and are not copied."""

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
            # Keys that nobody asks about get no gradient; all others are overwritten below.
            grad_k.zero_(), grad_v.zero_()
        for batch in call.same_shape_batches():
            queries, keys, values = _operands(q, k, v, batch)
            part_lse = lse[:, batch.query_index].unflatten(1, (batch.count, -1)).transpose(0, 1).contiguous()
            parts = _backward(
                _heads_first(grad_out, batch.query_index, batch.count),
                queries,
                keys,
                values,
                _heads_first(out, batch.query_index, batch.count),
                part_lse,
                0.0,
                call.causal,
                scale=scale,
            )
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

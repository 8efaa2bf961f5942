"""Variable-length flash attention on torch's own CUDA operators (bf16, fp16).

The schemas of torch 2.11 and 2.15 agree in all arguments used here. The log-sum-exp of a variable-length call is fp32
[N, rows]; a segment without queries gets zero gradients for its keys and values.
"""

from __future__ import annotations

from typing import Any

import torch

from vlm_pg.attention.kernels.base import Kernel, row_bounds
from vlm_pg.attention.kernels.flash_package import check_head_dim
from vlm_pg.attention.segments import SegmentCall

# With a longest query of one token the operator reshapes q to [segments, ...], which fails when another segment has no
# query. The maximum only sizes the launch; the lengths come from the cumulative sums.
_LEAST_MAX_QUERY = 2


class CudaFlashKernel(Kernel):
    """torch's flash attention with cumulative lengths: no padding, no loop over groups, native grouped-query heads."""

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
        # Without dropout no random state is read, but the operator wants tensors in those places.
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),  # read by pointer, whatever its strides
            cu_q,
            cu_k,
            max(_LEAST_MAX_QUERY, call.max_query_length),
            call.max_key_length,
            0.0,
            call.causal,
            random_state,
            unused,
            scale=scale,
        )

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_head_dim(q, self.name)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale
        )
        return out, lse[:, :, : q.shape[1]]

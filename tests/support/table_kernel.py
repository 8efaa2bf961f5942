"""A kernel that, as those of a GPU, finds lengths in tensors alone: what a recorded step reads may have changed."""

from __future__ import annotations

import torch

from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.attention.tree import SegmentCall


class TableKernel(CpuFlashKernel):
    """One softmax over all keys, those of other segments masked. Queries behind the last segment get NaN."""

    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cu_q, cu_k = call.cu_seqlens(q.device)
        of_query = torch.searchsorted(cu_q[1:], torch.arange(len(q), dtype=torch.int32), right=True)
        of_key = torch.searchsorted(cu_k[1:], torch.arange(len(k), dtype=torch.int32), right=True)
        enough = (cu_q.diff().max() <= call.max_query_length) & (cu_k.diff().max() <= call.max_key_length)
        # Beyond the last segment anything may lie, NaN too; lengths beyond the given ones leave keys out.
        stored = (of_key < len(cu_k) - 1) & enough
        k, v = (
            torch.where(stored[:, None, None], x, 0.0).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)
        )
        scores = torch.einsum("qnh,knh->nqk", q, k) * scale
        scores = scores.masked_fill((of_query[:, None] != of_key) | ~stored, -torch.inf)
        return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v), scores.logsumexp(-1)

"""What a kernel must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from vlm_pg.attention.segments import SegmentCall


class Kernel(ABC):
    """Attention forward and backward that expose the log-sum-exp.

    Shapes: q, out, grad_out [rows, N, H]; k, v [rows, K, H]; lse fp32 (fp64 for fp64 inputs) [N, rows].
    """

    name: str

    @classmethod
    @abstractmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if the kernel can run here, else the reason in words."""

    @abstractmethod
    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of one variable-length call, on rows already cut to the call's ranges."""

    @abstractmethod
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
        """Gradients of q, k, v. ``out`` and ``lse`` are those of the full softmax, which may span several calls."""

    @abstractmethod
    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Non-causal attention of a padded-free batch, for decoding: q [B, Lq, N, H], k, v [B, Lk, K, H].

        Returns out [B, Lq, N, H] and lse fp32 [B, N, Lq].
        """

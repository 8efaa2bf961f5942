"""What a kernel must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from vlm_pg.attention.tree import SegmentCall

# Flash kernels load rows of half precision in vectors of 16 bytes, and exist up to a head dim of 256.
HEAD_DIM_MULTIPLE, LARGEST_HEAD_DIM = 8, 256


class Kernel(ABC):
    """Attention forward and backward that expose the log-sum-exp.

    Shapes: q, out, grad_out [rows, N, H]; k, v [rows, K, H]; lse fp32 (fp64 for fp64 inputs) [N, rows].
    """

    name: str
    # Whether ``auto`` skips it.
    by_name_only = False
    # Multiprocessors of the device; set to count for a device that is not there.
    multiprocessors: int | None = None

    def tiles_at_once(self, device: torch.device) -> int | None:
        """Thread blocks that the device runs at a time, two a multiprocessor; None where calls need not be cut."""
        if self.multiprocessors is None:
            if device.type != "cuda" or not torch.cuda.is_available():
                return None
            return 2 * torch.cuda.get_device_properties(device).multi_processor_count
        return 2 * self.multiprocessors

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

    @abstractmethod
    def ragged_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One query a row over that row's own keys, for decoding: q [R, N, H], k, v [R, C, K, H].

        ``lengths``: int32 [R] beside the tensors; row r attends to its first ``lengths[r]`` keys, 1 to C. The keys and
        values behind them must be finite. The host does not look at lengths, so a CUDA graph can hold this call.

        Returns out [R, N, H] and lse fp32 [N, R].
        """


def check_head_dim(q: torch.Tensor, kernel: str) -> None:
    """Raise ValueError for a head dim that flash kernels do not have."""
    head_dim = q.shape[-1]
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > LARGEST_HEAD_DIM:
        raise ValueError(
            f"Attention kernel {kernel!r} got head dim {head_dim}; it takes multiples of {HEAD_DIM_MULTIPLE} up to "
            f"{LARGEST_HEAD_DIM}. Set model.attention_kernel=cuda-efficient."
        )


def row_bounds(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Cumulative lengths int32 [rows + 1] of equally long segments.

    Not cached: a cache could drop a tensor that a captured graph still reads.
    """
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)

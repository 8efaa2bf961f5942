"""The interface of kernels, and what flash kernels of torch and of packages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from vlm_pg.attention.tree import SegmentCall

# Output and log-sum-exp; gradients of q, k, v; cumulative lengths of queries and keys, and the longest of each.
OutLse = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]
Bounds = tuple[Tensor, Tensor, int, int]
# Flash kernels load rows of half precision in vectors of 16 bytes, and exist up to a head dim of 256.
HEAD_DIM_MULTIPLE, LARGEST_HEAD_DIM = 8, 256


class Kernel(ABC):
    """Attention forward and backward that expose the log-sum-exp.

    Shapes: q, out, grad [rows, N, H]; k, v [rows, K, H]; lse fp32 (fp64 for fp64 inputs) [N, rows].
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
    def segments_forward(self, q: Tensor, k: Tensor, v: Tensor, call: SegmentCall, scale: float) -> OutLse:
        """Output and log-sum-exp of one variable-length call, on rows already cut to the call's ranges."""

    @abstractmethod
    def segments_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: SegmentCall, scale: float
    ) -> Grads:
        """Gradients of q, k, v. ``out`` and ``lse`` are those of the full softmax, which may span several calls."""

    @abstractmethod
    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
        """Non-causal attention of a padded-free batch, for decoding: q [B, Lq, N, H], k, v [B, Lk, K, H].

        Returns out [B, Lq, N, H] and lse fp32 [B, N, Lq].
        """

    @abstractmethod
    def ragged_forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> OutLse:
        """One query a row over that row's own keys, for decoding: q [R, N, H], k, v [R, C, K, H].

        ``lengths``: int32 [R] beside the tensors; row r attends to its first ``lengths[r]`` keys, 1 to C. The keys and
        values behind them must be finite. The host does not look at lengths, so a CUDA graph can hold this call.

        Returns out [R, N, H] and lse fp32 [N, R].
        """


class FlashKernel(Kernel):
    """Flash attention in half precision on CUDA, by operators that take cumulative lengths and know grouped queries.

    The log-sum-exp of a variable-length call is fp32 [N, rows]; keys and values of a segment without queries get zero
    gradients.
    """

    # Shortest maximum query length that may be announced. At 1 some operators reshape q to [segments, ...], which fails
    # when another segment has no query. The maximum only sizes the launch; lengths come from the cumulative sums.
    least_max_query: ClassVar[int] = 1

    @classmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA devices, the tensors are on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash attention takes bf16 or fp16, not {dtype}"
        return cls.unsupported_on(torch.cuda.get_device_capability(device))

    @classmethod
    @abstractmethod
    def unsupported_on(cls, capability: tuple[int, int]) -> str | None:
        """None if the kernel runs on a GPU of this compute capability, else the reason in words."""

    @abstractmethod
    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool, used_k: Tensor | None = None
    ) -> OutLse:
        """``used_k``: int32 [segments], keys of each segment that count; None: all of them."""

    def segments_forward(self, q: Tensor, k: Tensor, v: Tensor, call: SegmentCall, scale: float) -> OutLse:
        self.check_head_dim(q)
        return self.varlen_forward(q, k, v, self.bounds(q, call), scale, call.causal)

    def ragged_forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> OutLse:
        self.check_head_dim(q)
        rows, capacity = k.shape[:2]
        # Every segment has its one query here, so the operators' own way of decoding is wanted.
        bounds = row_bounds(rows, 1, q.device), row_bounds(rows, capacity, q.device), 1, capacity
        return self.varlen_forward(q, k.flatten(0, 1), v.flatten(0, 1), bounds, scale, False, lengths)

    def bounds(self, q: Tensor, call: SegmentCall) -> Bounds:
        cu_q, cu_k = call.cu_seqlens(q.device)
        return cu_q, cu_k, max(self.least_max_query, call.max_query_length), call.max_key_length

    def check_head_dim(self, q: Tensor) -> None:
        """Raise ValueError for a head dim that flash kernels do not have."""
        head_dim = q.shape[-1]
        if head_dim % HEAD_DIM_MULTIPLE or head_dim > LARGEST_HEAD_DIM:
            raise ValueError(
                f"Attention kernel {self.name!r} got head dim {head_dim}; it takes multiples of {HEAD_DIM_MULTIPLE} up "
                f"to {LARGEST_HEAD_DIM}. Set model.attention_kernel=cuda-efficient."
            )


def row_bounds(rows: int, length: int, device: torch.device) -> Tensor:
    """Cumulative lengths int32 [rows + 1] of equally long segments.

    Not cached: a cache could drop a tensor that a captured graph still reads.
    """
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)

"""What the kernels of the three FlashAttention packages have in common.

All of them take cumulative lengths, know grouped-query heads, return the log-sum-exp as fp32 [N, rows], and have a
backward that recomputes probabilities from the output and log-sum-exp it is given, so merged ones may be passed.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from vlm_pg.attention.kernels.base import Kernel, row_bounds
from vlm_pg.attention.kernels.entry_points import EntryPointError
from vlm_pg.attention.segments import SegmentCall

EntryPoints = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]

# 16-byte loads of half-precision rows.
HEAD_DIM_MULTIPLE = 8


def check_head_dim(q: torch.Tensor, kernel: str, largest: int = 256) -> None:
    """Flash kernels load rows in vectors of 16 bytes and exist up to a certain head dim.

    Raises:
        ValueError: a head dim that they do not have.
    """
    head_dim = q.shape[-1]
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > largest:
        raise ValueError(
            f"Attention kernel {kernel!r} got head dim {head_dim}; it takes multiples of {HEAD_DIM_MULTIPLE} up to "
            f"{largest}. Set model.attention_kernel=cuda-efficient."
        )


class FlashPackageKernel(Kernel):
    """A kernel from an installed package.

    ``majors`` are the major compute capabilities its forward and backward support. Entry points are looked up once;
    a package that does not import, or whose functions have changed, makes the kernel unavailable with that reason.
    """

    majors: ClassVar[tuple[int, ...]]
    # Shortest maximum query length that may be announced, see FlashAttention-2.
    least_max_query: ClassVar[int] = 1

    def __init__(self) -> None:
        self._forward, self._backward, self._dense, self._ragged = self.entry_points()

    @classmethod
    @abstractmethod
    def entry_points(cls) -> EntryPoints:
        """Functions for segments_forward, segments_backward, dense_forward and ragged_forward.

        They take the names used below.

        Raises:
            EntryPointError: the package is not importable or not one that this kernel knows.
        """

    @classmethod
    def unavailable_because(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"it runs on CUDA devices, the tensors are on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash attention takes bf16 or fp16, not {dtype}"
        major = torch.cuda.get_device_capability(device)[0]
        if major not in cls.majors:
            return f"it runs on compute capability {', '.join(f'{m}.x' for m in cls.majors)}, this GPU has {major}.x"
        return _problem(cls)

    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_head_dim(q, self.name)
        out, lse, *_ = self._forward(q=q, k=k, v=v, **self._lengths(q, call), scale=scale, causal=call.causal)
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
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._backward(
            grad_out=grad_out,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse.contiguous(),  # read by pointer, whatever its strides
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
            **self._lengths(q, call),
            scale=scale,
            causal=call.causal,
        )
        return grad_q, grad_k, grad_v

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_head_dim(q, self.name)
        out, lse, *_ = self._dense(q=q, k=k, v=v, scale=scale, causal=False)
        return out, lse

    def ragged_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_head_dim(q, self.name)
        rows, capacity = k.shape[:2]
        out, lse, *_ = self._ragged(
            q=q,
            k=k.flatten(0, 1),
            v=v.flatten(0, 1),
            cu_q=row_bounds(rows, 1, q.device),
            cu_k=row_bounds(rows, capacity, q.device),
            used_k=lengths,
            max_q=1,
            max_k=capacity,
            scale=scale,
            causal=False,
        )
        return out, lse

    def _lengths(self, q: torch.Tensor, call: SegmentCall) -> dict[str, Any]:
        cu_q, cu_k = call.cu_seqlens(q.device)
        return {
            "cu_q": cu_q,
            "cu_k": cu_k,
            "max_q": max(self.least_max_query, call.max_query_length),
            "max_k": call.max_key_length,
        }


@functools.cache
def _problem(kernel: type[FlashPackageKernel]) -> str | None:
    try:
        kernel.entry_points()
    except EntryPointError as error:
        return str(error)
    return None

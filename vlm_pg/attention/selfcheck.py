"""Before a kernel is trusted: small trees and one decoding step against plain softmax, values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vlm_pg.attention.grouped import grouped_attention
from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.kernels.oracle import OracleKernel, oracle_attention
from vlm_pg.attention.plan import AttentionPlan, full_plan, reading_plan
from vlm_pg.attention.tree import PrefixTree

# Relative to the largest value; half precision rounds inputs, probabilities and outputs.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}

# Three levels, ragged, with nodes without descendants and a root longer than one block of most kernels; and a response
# of one token beside a group without any, which some kernels treat as decoding.
TREES = (PrefixTree([150, 9, 37, 1, 8, 3, 70], [-1, -1, 0, 0, 1, 2, 2]), PrefixTree([33, 20, 1], [-1, -1, 0]))

# Plans that a model runs: all rows have queries; in a last layer prompt ends and responses; in a chunk only responses.
PLANS = (
    full_plan(TREES[0]),
    full_plan(TREES[1]),
    reading_plan(TREES[0], ["last", "none", "all", "last", "last", "all", "all"]),
    reading_plan(TREES[0], ["none", "none", "none", "all", "all", "all", "all"]),
    reading_plan(TREES[1], ["last", "last", "all"]),
)


@functools.cache
def checked_kernel(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, name: str = "auto"
) -> Kernel:
    """The kernel of that name, by default chosen by capability, checked once."""
    kernel = select_kernel(device, dtype, name)
    check_kernel(kernel, device, dtype, num_heads, num_kv_heads, head_dim)
    return kernel


def check_kernel(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> float:
    """Largest relative difference between ``kernel`` and plain softmax over output, dq, dk, dv and a decoding step.

    Raises:
        RuntimeError: the difference is too large or not a number: this kernel must not be used here.
    """
    generator = torch.Generator().manual_seed(0)
    pairs: list[tuple[Tensor, Tensor]] = []

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, head_dim, generator=generator).to(device, dtype)

    with torch.autocast(device.type, enabled=False), _separate_graphs():  # the oracle must not be rounded
        for plan in PLANS:
            inputs = [random(plan.num_queries, num_heads), *(random(plan.num_keys, num_kv_heads) for _ in range(2))]
            pairs.extend(_plan_results(kernel, plan, inputs, random(plan.num_queries, num_heads)))
        decoding = random(2, 1, num_heads), random(2, 19, num_kv_heads), random(2, 19, num_kv_heads)
        pairs.extend(_decoding_results(kernel, "dense_forward", *decoding))
        ragged = random(4, num_heads), random(4, 192, num_kv_heads), random(4, 192, num_kv_heads)
        lengths = torch.tensor([1, 64, 131, 192], dtype=torch.int32).to(device)
        pairs.extend(_decoding_results(kernel, "ragged_forward", *ragged, lengths))
    # Reduced by torch: Python's max would pass over a NaN.
    worst = torch.stack([((a.to(b.dtype) - b).abs().max() / b.abs().max()) for a, b in pairs]).max().item()
    if not worst <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"Attention kernel {kernel.name!r} differs from the plain softmax by {worst:.1e} (relative) on {device} in "
            f"{dtype}; at most {TOLERANCE[dtype]:.0e} is allowed. Choose another model.attention_kernel."
        )
    return worst


@contextmanager
def _separate_graphs() -> Iterator[None]:
    """Keep graphs made inside apart from a surrounding checkpoint, which would count their saved tensors as its own.

    Only the innermost saved-tensor hooks run, so hooks that keep the tensor are enough.
    """
    keep = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
    with torch.inference_mode(False), torch.enable_grad(), keep:
        yield


def _plan_results(
    kernel: Kernel, plan: AttentionPlan, inputs: list[Tensor], upstream: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(kernel's, plain softmax's) output and gradients of q, k, v."""
    wide = torch.promote_types(upstream.dtype, torch.float32)
    q, k, v = (x.requires_grad_() for x in inputs)
    wide_q, wide_k, wide_v = (x.detach().to(wide).requires_grad_() for x in inputs)
    out = grouped_attention(q, k, v, plan, kernel=kernel)
    expected = oracle_attention(wide_q, wide_k, wide_v, plan)
    yield out.detach(), expected.detach()
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    yield from zip(grads, torch.autograd.grad(expected, (wide_q, wide_k, wide_v), upstream.to(wide)), strict=True)


@torch.no_grad()
def _decoding_results(
    kernel: Kernel, method: str, q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(kernel's, plain softmax's) output and log-sum-exp of new tokens over their own keys."""
    wide, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5
    got = getattr(kernel, method)(q, k, v, *lengths, scale)
    yield from zip(got, getattr(OracleKernel(), method)(*(x.to(wide) for x in (q, k, v)), *lengths, scale), strict=True)

"""The gate of a feed-forward layer as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = 1024


@triton.jit
def gated(gate, up, out, count, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program: some numbers of tensors that are contiguous."""
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = place < count
    given = tl.load(gate + place, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(given.dtype).to(tl.float32)
    product = active * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("vlm_pg::silu_mul", mutates_args=())
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, contiguous and of one shape and dtype, with silu(gate) rounded to that dtype as by a module."""
    out = torch.empty_like(gate)
    if not out.numel():
        return out
    assert gate.is_contiguous() and up.is_contiguous()
    with torch.cuda.device_of(gate):
        gated[(triton.cdiv(gate.numel(), NUMBERS),)](gate, up, out, gate.numel(), NUMBERS, enable_fp_fusion=False)
    return out


@silu_mul.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)

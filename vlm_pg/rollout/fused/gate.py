"""The gate of a feed-forward layer as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = 1024


@triton.jit
def gated(gate, up, out, count, gate_row, up_row, WIDTH: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program: some numbers of rows of WIDTH, ``gate_row`` and ``up_row`` apart; out is contiguous."""
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = place < count
    row, column = place // WIDTH, place % WIDTH
    given = tl.load(gate + row * gate_row + column, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(given.dtype).to(tl.float32)
    product = active * tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("vlm_pg::silu_mul", mutates_args=())
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of one shape [..., F] and dtype, with silu(gate) rounded to that dtype as by a module.

    Numbers of a row lie side by side and rows equally far apart: both may be parts of one tensor.
    """
    out, width = gate.new_empty(gate.shape), gate.shape[-1]
    if not out.numel():
        return out
    gates, ups = gate.view(-1, width), up.view(-1, width)
    assert gates.stride(1) == ups.stride(1) == 1
    with torch.cuda.device_of(gate):
        gated[(triton.cdiv(out.numel(), NUMBERS),)](
            gate, up, out, out.numel(), gates.stride(0), ups.stride(0), width, NUMBERS, enable_fp_fusion=False
        )
    return out


@silu_mul.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)

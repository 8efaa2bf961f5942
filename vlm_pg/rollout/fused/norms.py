"""RMS norms, with the residual sum before them where there is one, and the SwiGLU gate as one kernel each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Numbers that one program holds; a row of more is a program's own.
HELD = 2048


@triton.jit
def normed_rows(  # type: ignore[no-untyped-def]
    x, residual, weight, total, out, rows, inner, outer_stride, stride, epsilon,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, ROWS: tl.constexpr, AROUND_ONE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A program: some rows of x, ``inner`` at a time ``stride`` apart; all others are contiguous. ROOM >= WIDTH.

    ADDS: of x + residual, which is rounded and stored as ``total``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, ROOM)
    in_row = column < WIDTH
    inside = (row < rows)[:, None] & in_row[None, :]
    start = row // inner * outer_stride + row % inner * stride
    given = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)
    offset = row[:, None] * WIDTH + column[None, :]
    if ADDS:
        other = tl.load(residual + offset, mask=inside, other=0.0)
        given = (given.to(tl.float32) + other.to(tl.float32)).to(given.dtype)
        tl.store(total + offset, given, mask=inside)
    factor = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    wide = given.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + epsilon)[:, None]
    if AROUND_ONE:
        wide = wide * (1.0 + factor)
    else:
        wide = wide.to(given.dtype).to(tl.float32) * factor
    tl.store(out + offset, wide.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("vlm_pg::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, around_one: bool) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) over the last dimension, times the weight.

    Args:
        x: [..., N, D] in any floating dtype, numbers of a row side by side, N rows equally far apart, and so are the N
            of the dimensions before.
        weight: [D].
        around_one: times one plus the weight, rounded once, as Qwen3.5 has it; else the normed number is rounded to the
            dtype of x before it is multiplied, as Qwen2 and Qwen3 have it.
    """
    out = _result(x, weight, epsilon, around_one)
    _launch(x, None, weight, None, out, epsilon, around_one)
    return out


@torch.library.custom_op("vlm_pg::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, around_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, both [..., D], contiguous and of one dtype, and the ``rms_norm`` of this sum."""
    total, out = torch.empty_like(x), _result(x, weight, epsilon, around_one)
    assert x.is_contiguous() and residual.is_contiguous() and (x.shape, x.dtype) == (residual.shape, residual.dtype)
    _launch(x, residual, weight, total, out, epsilon, around_one)
    return total, out


@add_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), _result(x, weight, *rest)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    epsilon: float,
    around_one: bool,
) -> None:
    if not out.numel():
        return
    width = x.shape[-1]
    x = x.view(-1, x.shape[-2], width) if x.dim() > 2 else x.view(1, -1, width)
    count = out.numel() // width
    assert x.stride(2) == 1 and weight.is_contiguous()
    room = triton.next_power_of_2(width)
    rows = max(1, HELD // room)
    with torch.cuda.device_of(x):
        normed_rows[(triton.cdiv(count, rows),)](
            x, residual, weight, total, out, count, x.shape[1], x.stride(0), x.stride(1), epsilon, width, room, rows,
            around_one, residual is not None, num_warps=warps(room * rows), enable_fp_fusion=False,
        )  # fmt: skip


@rms_norm.register_fake
def _result(x: torch.Tensor, weight: torch.Tensor, epsilon: float, around_one: bool) -> torch.Tensor:
    dtype = x.dtype if around_one else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def warps(numbers: int) -> int:
    """Of a program that holds so many: some eight to sixteen a thread."""
    return min(8, max(1, numbers // 512))


NUMBERS = 1024


@triton.jit
def gated(gate, up, out, count, gate_row, up_row, WIDTH: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program: some numbers of rows of WIDTH, ``gate_row`` and ``up_row`` apart; out is contiguous."""
    offset = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = offset < count
    row, column = offset // WIDTH, offset % WIDTH
    given = tl.load(gate + row * gate_row + column, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(given.dtype).to(tl.float32)
    product = active * tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offset, product.to(out.dtype.element_ty), mask=inside)


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

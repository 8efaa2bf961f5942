"""Root mean square norms of rows as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Numbers that one program holds; a row of more is a program's own.
HELD = 2048


@triton.jit
def normed_rows(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    rows,
    inner,
    outer_stride,
    stride,
    epsilon,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    AROUND_ONE: tl.constexpr,
):
    """A program: some rows of x, ``inner`` at a time ``stride`` apart; out is contiguous. ROOM >= WIDTH."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, ROOM)
    in_row = column < WIDTH
    inside = (row < rows)[:, None] & in_row[None, :]
    start = row // inner * outer_stride + row % inner * stride
    given = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    wide = given.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + epsilon)[:, None]
    if AROUND_ONE:
        wide = wide * (1.0 + factor)
    else:
        wide = wide.to(given.dtype).to(tl.float32) * factor
    tl.store(out + row[:, None] * WIDTH + column[None, :], wide.to(out.dtype.element_ty), mask=inside)


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
    out = _result(x, weight, around_one)
    width = x.shape[-1]
    flat = x.view(-1, x.shape[-2], width) if x.dim() > 2 else x.view(1, -1, width)
    num_rows, room = out.numel() // width, triton.next_power_of_2(width)
    rows = max(1, HELD // room)
    if not out.numel():
        return out
    assert flat.stride(2) == 1 and weight.is_contiguous()
    with torch.cuda.device_of(x):
        normed_rows[(triton.cdiv(num_rows, rows),)](
            flat,
            weight,
            out,
            num_rows,
            flat.shape[1],
            flat.stride(0),
            flat.stride(1),
            epsilon,
            width,
            room,
            rows,
            around_one,
            num_warps=warps(room * rows),
            enable_fp_fusion=False,
        )
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, epsilon: float, around_one: bool) -> torch.Tensor:
    return _result(x, weight, around_one)


def _result(x: torch.Tensor, weight: torch.Tensor, around_one: bool) -> torch.Tensor:
    dtype = x.dtype if around_one else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def warps(numbers: int) -> int:
    """Of a program that holds so many: some eight to sixteen a thread."""
    return min(8, max(1, numbers // 512))

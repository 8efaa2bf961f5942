"""Attention's results over a row's own tokens and over pieces of its prompt, merged by one kernel.

R rows, N query heads, K key-value heads, H head dim, P pieces, T rows of all pieces' results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Numbers of pieces' results that a program holds at a time.
HELD = 2048


@triton.jit
def merged_head(  # type: ignore[no-untyped-def]
    own,
    own_lse,
    parts,
    parts_lse,
    places,
    out,
    out_lse,
    rows,
    pieces,
    lse_head,
    lse_row,
    part_row,
    part_head,
    part_lse_head,
    part_lse_row,
    N: tl.constexpr,
    REPEATS: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    PIECES: tl.constexpr,
):
    """A program: one query head of one row, with PIECES pieces at a time, relative to the highest lse so far."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, ROOM)
    inside = column < SIZE
    total = tl.load(own + (row * N + head) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(own_lse + head * lse_head + row * lse_row)
    weight = 1.0
    parts += (head // REPEATS) * part_head
    parts_lse += (head // REPEATS) * part_lse_head
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        place = tl.load(places + piece * rows + row, mask=piece < pieces, other=-1).to(tl.int64)
        there = place >= 0
        place += head % REPEATS
        lse = tl.load(parts_lse + place * part_lse_row, mask=there, other=float("-inf"))
        higher = tl.maximum(top, tl.max(lse, 0))
        shares = tl.exp(lse - higher)
        before = tl.exp(top - higher)
        masked = there[:, None] & inside[None, :]
        values = tl.load(parts + place[:, None] * part_row + column[None, :], mask=masked, other=0.0).to(tl.float32)
        total = total * before + tl.sum(values * shares[:, None], 0)
        weight = weight * before + tl.sum(shares, 0)
        top = higher
    result = (total / weight).to(out.dtype.element_ty)
    tl.store(out + (row * N + head) * SIZE + column, result, mask=inside)
    tl.store(out_lse + head * rows + row, top + tl.log(weight))


@torch.library.custom_op("vlm_pg::merge_parts", mutates_args=())
def merge_parts(
    own: torch.Tensor,
    own_lse: torch.Tensor,
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    places: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results over disjoint keys, joined as ``attention/merge.py`` says, all at once and rounded once.

    Args:
        own: [R, N, H] contiguous, any floating dtype; over some keys, so that its log-sum-exp is finite.
        own_lse: fp32 [N, R].
        parts: [T, K, H], the N / K query heads of a key-value head as rows one after the other.
        parts_lse: fp32 [K, T].
        places: int32 [P, R] contiguous, the first row of ``parts`` for each piece and row; -1: the row has none.
        dtype: of the result.

    Returns:
        [R, N, H] and fp32 [N, R].
    """
    out, out_lse = _results(own, own_lse, dtype)
    rows, heads, size = own.shape
    if not out.numel():
        return out, out_lse
    assert own.is_contiguous() and parts.stride(2) == 1
    room = triton.next_power_of_2(size)
    at_once = min(triton.next_power_of_2(len(places)), max(1, HELD // room))
    strides = (*own_lse.stride(), parts.stride(0), parts.stride(1), *parts_lse.stride())
    with torch.cuda.device_of(own):
        merged_head[(rows, heads)](
            own, own_lse, parts, parts_lse, places, out, out_lse, rows, len(places), *strides, heads,
            heads // parts.shape[1], size, room, at_once, enable_fp_fusion=False,
        )  # fmt: skip
    return out, out_lse


@merge_parts.register_fake
def _(
    own: torch.Tensor,
    own_lse: torch.Tensor,
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    places: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(own, own_lse, dtype)


def _results(own: torch.Tensor, own_lse: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return own.new_empty(own.shape, dtype=dtype), own_lse.new_empty(own_lse.shape)

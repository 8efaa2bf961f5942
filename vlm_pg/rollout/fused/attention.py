"""Attention of new tokens over their rows' own tokens, and its results merged with those over pieces of prompts.

R rows, N query heads, K key-value heads, H head dim, C tokens of room in a row, S parts of it, P pieces, T rows of all
pieces' results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Numbers of results that a program holds at a time.
HELD = 2048
# Keys that a program reads, and bytes of them at a time: of more, or with fewer warps, registers would be spilled.
PART_KEYS, BLOCK_BYTES, PART_WARPS = 256, 8192, 8


@triton.jit
def attended_part(  # type: ignore[no-untyped-def]
    q, keys, values, lengths, out, out_lse, rows, scale, q_row, q_head, key_row, key_token,
    KEYS: tl.constexpr, K: tl.constexpr, REPEATS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: KEYS tokens of one row and one key-value head, BLOCK at a time. HEADS >= REPEATS, ROOM >= SIZE."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first, length = part * KEYS, tl.load(lengths + row)
    repeat, column = tl.arange(0, HEADS), tl.arange(0, ROOM)
    query_head = head * REPEATS + repeat
    inside = (repeat < REPEATS)[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + row * q_row + query_head[:, None] * q_head + column[None, :], mask=inside, other=0.0)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, ROOM), tl.float32)
    begin = row * key_row + head * SIZE
    for start in range(first, min(first + KEYS, length), BLOCK):
        token = start + tl.arange(0, BLOCK)
        offset = begin + token[:, None] * key_token + column[None, :]
        there = (token < length)[:, None] & (column < SIZE)[None, :]
        key = tl.load(keys + offset, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((token < length)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        before = tl.exp(top - higher)
        value = tl.load(values + offset, mask=there, other=0.0)
        total = total * before[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        weight = weight * before + tl.sum(shares, 1)
        top = higher
    # A part behind the row's length has no keys, and a log-sum-exp of -inf.
    offset = ((part * rows + row) * K * REPEATS + query_head[:, None]) * SIZE + column[None, :]
    tl.store(out + offset, total / weight[:, None], mask=inside & (weight > 0.0)[:, None])
    tl.store(out_lse + (part * K * REPEATS + query_head) * rows + row, top + tl.log(weight), mask=repeat < REPEATS)


@torch.library.custom_op("vlm_pg::own_attention", mutates_args=())
def own_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query a row over the first tokens of that row, in parts that ``merge_parts`` joins.

    Args:
        q: [R, N, H], numbers of a head side by side.
        keys, values: [R, C, K, H], heads of a token side by side; both laid out alike.
        lengths: int32 [R], tokens of each row, at least 1.
        scale: of the scores.

    Returns:
        fp32 [S, R, N, H] and fp32 [S, N, R]; where a part has none of a row's tokens, anything, and -inf.
    """
    out, out_lse = _attended_results(q, keys)
    if not len(q):
        return out, out_lse
    (rows, heads, size), kv_heads = q.shape, keys.shape[2]
    assert q.stride(2) == 1 and keys.stride() == values.stride() and keys.stride()[2:] == (size, 1)
    room, repeats = max(16, triton.next_power_of_2(size)), heads // kv_heads
    with torch.cuda.device_of(q):
        attended_part[(rows, kv_heads, len(out))](
            q, keys, values, lengths, out, out_lse, rows, scale, *q.stride()[:2], *keys.stride()[:2], PART_KEYS,
            kv_heads, repeats, max(16, triton.next_power_of_2(repeats)), size, room,
            min(32, max(16, BLOCK_BYTES // (room * q.element_size()))), num_warps=PART_WARPS, num_stages=2,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, out_lse


@own_attention.register_fake
def _attended_results(q: torch.Tensor, keys: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, heads, size), parts = q.shape, -(-keys.shape[1] // PART_KEYS)
    wide = torch.float32
    return q.new_empty(parts, rows, heads, size, dtype=wide), q.new_empty(parts, heads, rows, dtype=wide)


@triton.jit
def joined(total, weight, top, values, lse):  # type: ignore[no-untyped-def]
    """What is known so far and a block of results, all relative to the highest log-sum-exp."""
    higher = tl.maximum(top, tl.max(lse, 0))
    shares = tl.exp(lse - higher)
    before = tl.exp(top - higher)
    total = total * before + tl.sum(values.to(tl.float32) * shares[:, None], 0)
    return total, weight * before + tl.sum(shares, 0), higher


@triton.jit
def merged_head(  # type: ignore[no-untyped-def]
    own, own_lse, parts, parts_lse, starts, out, out_lse, rows, own_parts, pieces, lse_part, lse_head, lse_row,
    part_row, part_head, part_lse_head, part_lse_row,
    N: tl.constexpr, REPEATS: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """A program: one query head of one row, with PARTS of its own tokens and then PIECES pieces at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, ROOM)
    inside = column < SIZE
    offset = row * N + head
    own_lse += head * lse_head + row * lse_row
    total = tl.load(own + offset * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(own_lse)
    weight = 1.0
    for start in range(1, own_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        lse = tl.load(own_lse + part * lse_part, mask=part < own_parts, other=float("-inf"))
        masked = (lse > float("-inf"))[:, None] & inside[None, :]
        given = own + (part.to(tl.int64)[:, None] * rows * N + offset) * SIZE + column[None, :]
        total, weight, top = joined(total, weight, top, tl.load(given, mask=masked, other=0.0), lse)
    parts += (head // REPEATS) * part_head
    parts_lse += (head // REPEATS) * part_lse_head
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        first = tl.load(starts + piece * rows + row, mask=piece < pieces, other=-1).to(tl.int64)
        there = first >= 0
        first += head % REPEATS
        lse = tl.load(parts_lse + first * part_lse_row, mask=there, other=float("-inf"))
        masked = there[:, None] & inside[None, :]
        given = parts + first[:, None] * part_row + column[None, :]
        total, weight, top = joined(total, weight, top, tl.load(given, mask=masked, other=0.0), lse)
    tl.store(out + offset * SIZE + column, (total / weight).to(out.dtype.element_ty), mask=inside)
    tl.store(out_lse + head * rows + row, top + tl.log(weight))


@torch.library.custom_op("vlm_pg::merge_parts", mutates_args=())
def merge_parts(
    own: torch.Tensor,
    own_lse: torch.Tensor,
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    starts: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results over disjoint keys, joined as ``merge_`` of ``attention/grouped.py`` does, all at once and rounded once.

    Args:
        own: [S, R, N, H] contiguous, any floating dtype; the first part over some keys, so that its log-sum-exp is
            finite.
        own_lse: fp32 [S, N, R]; -inf: over none.
        parts: [T, K, H], the N / K query heads of a key-value head as rows one after the other.
        parts_lse: fp32 [K, T].
        starts: int32 [P, R] contiguous, the first row of ``parts`` for each piece and row; -1: the row has none.
        dtype: of the result.

    Returns:
        [R, N, H] and fp32 [N, R].
    """
    out, out_lse = _merged_results(own, own_lse, dtype)
    rows, heads, size = out.shape
    if not out.numel():
        return out, out_lse
    assert own.is_contiguous() and parts.stride(2) == 1
    room = triton.next_power_of_2(size)
    at_once = [max(1, min(triton.next_power_of_2(count), HELD // room)) for count in (len(own) - 1, len(starts))]
    strides = (*own_lse.stride(), parts.stride(0), parts.stride(1), *parts_lse.stride())
    with torch.cuda.device_of(own):
        merged_head[(rows, heads)](
            own, own_lse, parts, parts_lse, starts, out, out_lse, rows, len(own), len(starts), *strides, heads,
            heads // parts.shape[1], size, room, *at_once, enable_fp_fusion=False,
        )  # fmt: skip
    return out, out_lse


@merge_parts.register_fake
def _merged_results(own: torch.Tensor, own_lse: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return own.new_empty(own.shape[1:], dtype=rest[-1]), own_lse.new_empty(own_lse.shape[1:])

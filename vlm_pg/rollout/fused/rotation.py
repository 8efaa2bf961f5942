"""New queries and keys on their way from projections to attention as one kernel: norms of heads, rotary positions, and
keys, values and queries written where attention reads them.

R rows of one new token each, N query heads, K key-value heads, H head dim, C numbers of a head that are rotated, S
slots of the KV cache, P pieces of prompts, Q query rows of the calls over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_pg.rollout.fused.norms import warps

# Numbers of pieces' queries that a program writes at a time.
HELD = 1024


@triton.jit
def scaled(x, scale, weight, epsilon, column, inside, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded as by ``norm.normed_rows``. NORM: 1 multiplies by the weight, 2 by one plus the weight."""
    wide = x.to(tl.float32) * scale
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if NORM == 2:
        wide = wide * (1.0 + factor)
    else:
        wide = wide.to(x.dtype).to(tl.float32) * factor
    return wide.to(x.dtype)


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    source, weight, epsilon, cos, sin,
    HALF: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A head's first and second half of what is rotated, and its rest.

    Every product is rounded, then their sum, as by operators of torch. ROOM >= HALF, REST >= SIZE - 2 HALF.
    """
    column = tl.arange(0, ROOM)
    inside = column < HALF
    first = tl.load(source + column, mask=inside, other=0.0)
    second = tl.load(source + HALF + column, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    index = 2 * HALF + tl.arange(0, REST)
    rest = tl.load(source + index, mask=index < SIZE, other=0.0)
    if NORM > 0:
        one, two, three = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        squares = tl.sum(one * one + two * two, 0) + tl.sum(three * three, 0)
        scale = tl.rsqrt(squares / SIZE + epsilon)
        first = scaled(first, scale, weight, epsilon, column, inside, NORM)
        second = scaled(second, scale, weight, epsilon, HALF + column, inside, NORM)
        rest = scaled(rest, scale, weight, epsilon, index, index < SIZE, NORM)
    one, two = first.to(tl.float32), second.to(tl.float32)
    c = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)
    left = ((one * c).to(dtype).to(tl.float32) + (-two * s).to(dtype).to(tl.float32)).to(dtype)
    c = tl.load(cos + HALF + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + HALF + column, mask=inside, other=0.0).to(tl.float32)
    right = ((two * c).to(dtype).to(tl.float32) + (one * s).to(dtype).to(tl.float32)).to(dtype)
    return left, right, rest


@triton.jit
def stored(  # type: ignore[no-untyped-def]
    out, there, left, right, rest, HALF: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, REST: tl.constexpr
):
    """One head at each of the addresses ``out`` that are ``there``."""
    column = tl.arange(0, ROOM)[None, :]
    inside = there[:, None] & (column < HALF)
    tl.store(out[:, None] + column, left[None, :], mask=inside)
    tl.store(out[:, None] + HALF + column, right[None, :], mask=inside)
    if SIZE > 2 * HALF:
        index = 2 * HALF + tl.arange(0, REST)[None, :]
        tl.store(out[:, None] + index, rest[None, :], mask=there[:, None] & (index < SIZE))


@triton.jit
def appended(  # type: ignore[no-untyped-def]
    q, k, v, q_weight, k_weight, cos, sin, newest, starts, q_out, keys, values, queries, epsilon, rows, pieces, q_row,
    q_head, k_row, k_head, v_row, v_head,
    N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, REST: tl.constexpr,
    NORM: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A program: one head of one row, of queries, keys or values; PIECES copies of a query at a time, 0 if none."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += row * 2 * HALF
    sin += row * 2 * HALF
    here = tl.arange(0, 1)
    if head < N:
        source = q + row * q_row + head * q_head
        left, right, rest = rotated(source, q_weight, epsilon, cos, sin, HALF, SIZE, ROOM, REST, NORM)
        out = q_out + (row * N + head) * SIZE + here
        stored(out, here == 0, left, right, rest, HALF, SIZE, ROOM, REST)
        if PIECES > 0:
            for first in range(0, pieces, PIECES):
                piece = first + tl.arange(0, PIECES)
                start = tl.load(starts + piece * rows + row, mask=piece < pieces, other=-1).to(tl.int64)
                there = queries + ((start + head % (N // K)) * K + head // (N // K)) * SIZE
                stored(there, start >= 0, left, right, rest, HALF, SIZE, ROOM, REST)
    elif head < N + K:
        head -= N
        source = k + row * k_row + head * k_head
        left, right, rest = rotated(source, k_weight, epsilon, cos, sin, HALF, SIZE, ROOM, REST, NORM)
        out = keys + (tl.load(newest + row) * K + head) * SIZE + here
        stored(out, here == 0, left, right, rest, HALF, SIZE, ROOM, REST)
    else:
        head -= N + K
        source = v + row * v_row + head * v_head
        new = values + (tl.load(newest + row) * K + head) * SIZE
        for begin in tl.static_range(0, SIZE, ROOM):
            column = begin + tl.arange(0, ROOM)
            tl.store(new + column, tl.load(source + column, mask=column < SIZE, other=0.0), mask=column < SIZE)


@torch.library.custom_op("vlm_pg::rotate_append", mutates_args=("keys", "values", "queries"))
def rotate_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: list[torch.Tensor],
    epsilon: float,
    around_one: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    newest: torch.Tensor,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """Queries and keys are normed, head by head, where there are weights; then the first C numbers x of a head become
    x * cos + half(x) * sin; half(x): the second half negated, the first.

    Args:
        q: [R, N, H], numbers of a head side by side.
        k, v: [R, K, H].
        cos, sin: [R, C] of their dtype, contiguous.
        weights: [H] each, of the norms of queries and keys (``norm.rms_norm``); empty: these have none.
        keys, values: [S, K, H], contiguous; written.
        newest: int64 [R], each row's slot in them.
        queries: [Q, K, H], contiguous; written: the N / K query heads of a key-value head as rows one after the other.
        starts: int32 [P, R], contiguous: the first of these rows for each piece and row; -1: the row has none.

    Returns:
        The queries [R, N, H].
    """
    (rows, heads, size), kv_heads, half = q.shape, k.shape[1], cos.shape[-1] // 2
    out = q.new_empty(q.shape)
    if not rows:
        return out
    assert all(x.stride(2) == 1 for x in (q, k, v))
    assert all(x.is_contiguous() for x in (cos, sin, keys, values, *weights))
    room, pieces, at_once = triton.next_power_of_2(half), 0, 0
    if queries is not None:
        assert starts is not None and queries.is_contiguous() and starts.is_contiguous()
        pieces = len(starts)
        at_once = max(1, min(triton.next_power_of_2(pieces), HELD // room))
    q_weight, k_weight = weights or (None, None)
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    with torch.cuda.device_of(q):
        appended[(rows, heads + 2 * kv_heads)](
            q, k, v, q_weight, k_weight, cos, sin, newest, starts, out, keys, values, queries, epsilon, rows, pieces,
            *strides, heads, kv_heads, half, size, room, triton.next_power_of_2(max(1, size - 2 * half)),
            (1 + around_one) * bool(weights), at_once, num_warps=warps(size), enable_fp_fusion=False,
        )  # fmt: skip
    return out


@rotate_append.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)

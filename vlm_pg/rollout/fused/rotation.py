"""Rotary positions of new queries and keys as one kernel.

N query heads, K key-value heads, T tokens, H head dim, R of whose numbers are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_pg.rollout.fused.norm import warps


@triton.jit
def rotated_head(source, out, cos, sin, HALF: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, REST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every product is rounded, then their sum, as by operators of torch. ROOM >= HALF, REST >= SIZE - 2 HALF."""
    column = tl.arange(0, ROOM)
    inside = column < HALF
    first = tl.load(source + column, mask=inside, other=0.0)
    second = tl.load(source + HALF + column, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    one, two = first.to(tl.float32), second.to(tl.float32)
    for part in tl.static_range(2):
        c = tl.load(cos + part * HALF + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + part * HALF + column, mask=inside, other=0.0).to(tl.float32)
        if part == 0:
            here, there = one, -two
        else:
            here, there = two, one
        along, across = (here * c).to(dtype).to(tl.float32), (there * s).to(dtype).to(tl.float32)
        tl.store(out + part * HALF + column, (along + across).to(dtype), mask=inside)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)
        inside = column < SIZE
        tl.store(out + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_token,
    q_head,
    k_token,
    k_head,
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    REST: tl.constexpr,
):
    """A program: one head of one token. Outputs [T, N, H] and [T, K, H], cos and sin [T, R], are contiguous."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    if head < N:
        source, out = q + token * q_token + head * q_head, q_out + (token * N + head) * SIZE
        rotated_head(source, out, cos, sin, HALF, SIZE, ROOM, REST)
    else:
        head -= N
        source, out = k + token * k_token + head * k_head, k_out + (token * K + head) * SIZE
        rotated_head(source, out, cos, sin, HALF, SIZE, ROOM, REST)


@torch.library.custom_op("vlm_pg::rotate", mutates_args=())
def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each head the first R numbers x become x * cos + half(x) * sin; half(x): the second half negated, the first.

    Args:
        q: [1, N, T, H], numbers of a head side by side.
        k: [1, K, T, H].
        cos, sin: [1, T, R] of their dtype, contiguous.

    Returns:
        The same shapes, all heads of a token side by side.
    """
    q_out, k_out = _results(q, k)
    (_, heads, tokens, size), kv_heads, half = q.shape, k.shape[1], cos.shape[-1] // 2
    assert q.stride(3) == k.stride(3) == 1 and cos.is_contiguous() and sin.is_contiguous()
    if not tokens:
        return q_out, k_out
    room, rest = triton.next_power_of_2(half), size - 2 * half
    strides = (q.stride(2), q.stride(1), k.stride(2), k.stride(1))
    with torch.cuda.device_of(q):
        rotated[(tokens, heads + kv_heads)](
            q, k, cos, sin, q_out, k_out, *strides, heads, kv_heads, half, size, room,
            triton.next_power_of_2(rest) if rest else 0, num_warps=warps(size),
            enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


@rotate.register_fake
def _(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(q, k)


def _results(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = (x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k))
    return q_out, k_out

"""One token of the gated delta rule as one Triton kernel: each state is read once and written once.

``linear_step.gated_delta_step_`` has the formula; its torch operators read a state three times and write it twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_pg.models.linear_attention import NORM_EPSILON

# Columns of the state that one program holds: [128, 32] in fp32 are 32 registers a thread of 4 warps.
COLUMNS = 32


@triton.jit
def one_token(  # type: ignore[no-untyped-def]
    state, query, key, value, log_decay, beta, out, scale, epsilon,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_ROOM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program: some columns of the state of one head of one row. All tensors are contiguous; KEY_ROOM >= KEY."""
    head = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, KEY_ROOM)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = rows < KEY, columns < VALUE
    k = tl.load(key + head * KEY + rows, mask=in_key, other=0.0).to(tl.float32)
    q = tl.load(query + head * KEY + rows, mask=in_key, other=0.0).to(tl.float32)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + epsilon)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + epsilon) * scale)
    pointers = state + head * (KEY * VALUE) + rows[:, None] * VALUE + columns[None, :]
    inside = in_key[:, None] & in_value[None, :]
    s = tl.load(pointers, mask=inside, other=0.0) * tl.exp(tl.load(log_decay + head).to(tl.float32))
    v = tl.load(value + head * VALUE + columns, mask=in_value, other=0.0).to(tl.float32)
    delta = (v - tl.sum(s * k[:, None], 0)) * tl.load(beta + head).to(tl.float32)
    s += k[:, None] * delta[None, :]
    tl.store(pointers, s, mask=inside)
    tl.store(out + head * VALUE + columns, tl.sum(s * q[:, None], 0), mask=in_value)


def gated_delta_step_(state: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """As ``linear_step.gated_delta_step_``."""
    return _step_(state, *(x.contiguous() for x in operands))


@torch.library.custom_op("vlm_pg::gated_delta_step_", mutates_args=("state",))
def _step_(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """A torch operator, so that dispatch modes count it; all operands are contiguous."""
    size, columns = state.shape[-2:]
    out = state.new_empty(value.shape)
    grid = (state.shape[0] * state.shape[1], triton.cdiv(columns, COLUMNS))
    if not out.numel():
        return out
    room = triton.next_power_of_2(size)
    with torch.cuda.device_of(state):
        one_token[grid](
            state, query, key, value, log_decay, beta, out, size**-0.5, NORM_EPSILON, size, columns, room, COLUMNS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@_step_.register_fake
def _(state: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return state.new_empty(value.shape)

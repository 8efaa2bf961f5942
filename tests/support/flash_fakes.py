"""Stand-ins for compiled flash attention: the argument lists of real packages and operators, computed by plain softmax.

They hold callers to what the real ones rely on (int32 lengths, contiguous log-sum-exps, gradients filled in place), so
that wiring and layouts can be tested without a GPU. Only the arithmetic is ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

Lengths = tuple[torch.Tensor | None, torch.Tensor | None, int | None, int | None]


def segments(total: int, batch: int | None, cumulative: torch.Tensor | None, longest: int | None) -> list[slice]:
    """Rows of each segment, after checking what kernels take on trust."""
    if cumulative is None:
        assert batch is not None
        return [slice(i * (total // batch), (i + 1) * (total // batch)) for i in range(batch)]
    assert cumulative.dtype == torch.int32 and cumulative.is_contiguous()
    bounds = cumulative.tolist()
    assert bounds[0] == 0 and bounds[-1] == total
    assert isinstance(longest, int) and longest >= max(b - a for a, b in pairwise(bounds))
    return [slice(a, b) for a, b in pairwise(bounds)]


def probabilities(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Scores [K, repeats, q, k] of q [q, N, H] and k [k, K, H], minus infinity where masked."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qgrh,kgh->grqk", grouped, k) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    scale: float,
    causal: bool,
    used_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output as q, log-sum-exp [N, rows] or, dense, [B, N, length]; ``used_k``: keys of each segment that count."""
    if q.dim() == 4:
        parts = [forward(*(x[i] for x in (q, k, v)), _one(q[i], k[i]), scale, causal) for i in range(q.shape[0])]
        return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    cu_q, cu_k, max_q, max_k = lengths
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    key_segments = segments(len(k), None, cu_k, max_k)
    if used_k is not None:
        assert used_k.dtype == torch.int32 and used_k.is_contiguous() and used_k.shape == (len(key_segments),)
        assert all(0 < used <= s.stop - s.start for used, s in zip(used_k.tolist(), key_segments, strict=True))
        key_segments = [slice(s.start, s.start + n) for s, n in zip(key_segments, used_k.tolist(), strict=True)]
    for rows, keys in zip(segments(len(q), None, cu_q, max_q), key_segments, strict=True):
        scores = probabilities(q[rows], k[keys], scale, causal)
        part_lse = scores.logsumexp(-1)
        part = torch.einsum("grqk,kgh->qgrh", (scores - part_lse[..., None]).exp(), v[keys])
        out[rows], lse[:, rows] = part.flatten(1, 2), part_lse.flatten(0, 1)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lengths: Lengths,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P = exp(S - lse) and D = <grad_out, out> from what is given, as every flash backward does."""
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    cu_q, cu_k, max_q, max_k = lengths
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in zip(segments(len(q), None, cu_q, max_q), segments(len(k), None, cu_k, max_k), strict=True):
        kv_heads = k.shape[1]
        p = (
            probabilities(q[rows], k[keys], scale, causal) - lse[:, rows].unflatten(0, (kv_heads, -1))[..., None]
        ).exp()
        upstream, merged, queries = (x[rows].unflatten(1, (kv_heads, -1)) for x in (grad_out, out, q))
        delta = (upstream * merged).sum(-1).permute(1, 2, 0)[..., None]
        grad_scores = p * (torch.einsum("qgrh,kgh->grqk", upstream, v[keys]) - delta) * scale
        grad_q[rows] = torch.einsum("grqk,kgh->qgrh", grad_scores, k[keys]).flatten(1, 2)
        grad_k[keys] = torch.einsum("grqk,qgrh->kgh", grad_scores, queries)
        grad_v[keys] = torch.einsum("grqk,qgrh->kgh", p, upstream)
    return grad_q, grad_k, grad_v


def _one(q: torch.Tensor, k: torch.Tensor) -> Lengths:
    return (*(torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k)), len(q), len(k))  # type: ignore[return-value]


def _as_decoding(q: torch.Tensor, k: torch.Tensor, cumulative: torch.Tensor) -> None:
    """FlashAttention-2's shortcut for a longest query of one token: fails where a segment has none."""
    q.reshape(len(cumulative) - 1, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])


def _fill(targets: tuple[Any, ...], values: tuple[torch.Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target.is_contiguous() and target.dtype == value.dtype
        target.copy_(value)


def _module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def flash_attn_2() -> ModuleType:
    """flash-attn 2.8: ``flash_attn.flash_attn_interface``."""

    # fmt: off
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):
        assert dropout_p == 0 and window_size_left == window_size_right == -1 and softcap == 0
        if max_seqlen_q == 1 and q.shape[1] > k.shape[1]:
            _as_decoding(q, k, cu_seqlens_q)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *forward(q, k, v, lengths, softmax_scale, causal, seqused_k), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):
        assert dropout_p == 0 and window_size_left == window_size_right == -1 and softcap == 0
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _fill((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, causal))
        return torch.empty(0)

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):
        assert dropout_p == 0 and window_size_left == window_size_right == -1 and softcap == 0
        return *forward(q, k, v, (None,) * 4, softmax_scale, causal), torch.empty(0), torch.empty(2)
    # fmt: on

    return _module(
        "flash_attn.flash_attn_interface", _flash_attn_varlen_forward, _flash_attn_varlen_backward, _flash_attn_forward
    )


def flash_attn_3_positional() -> ModuleType:
    """FlashAttention-3 as of early 2025: optional tensors have no defaults, the backward's flag is ``causal``."""

    # fmt: off
    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):
        assert out is k_new is rotary_cos is q_descale is None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return forward(q, k, v, lengths, softmax_scale, causal, seqused_k)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _fill((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, causal))
        return dq, dk, dv, torch.empty(0)
    # fmt: on

    return _module("flash_attn_interface", _flash_attn_forward, _flash_attn_backward)


def flash_attn_3() -> ModuleType:
    """FlashAttention-3 since it registers torch operators: everything has a default, the flag is ``is_causal``."""

    # fmt: off
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *forward(q, k, v, lengths, softmax_scale, causal, seqused_k), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _fill((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, is_causal))
        return torch.empty(0)
    # fmt: on

    class Operator:
        """torch's custom operators are objects whose own signature says nothing."""

        def __init__(self, function: Callable[..., Any]):
            self._init_fn = function
            self.__name__ = function.__name__

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._init_fn(*args, **kwargs)

    return _module("flash_attn_3.flash_attn_interface", Operator(_flash_attn_forward), Operator(_flash_attn_backward))


def flash_attn_4() -> ModuleType:
    """flash-attn-4: ``flash_attn.cute.interface``."""

    # fmt: off
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, num_splits=1, pack_gqa=None, return_lse=False, out=None,
        lse=None,
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        result, result_lse = forward(q, k, v, lengths, softmax_scale, causal, seqused_k)
        return result, result_lse if return_lse else None, None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, dlse=None,
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _fill((dq, dk, dv), backward(dout, q, k, v, out, lse, lengths, softmax_scale, causal))
        return dq, dk, dv
    # fmt: on

    return _module("flash_attn.cute.interface", _flash_attn_fwd, _flash_attn_bwd)


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)


@contextmanager
def torch_cuda_operators_on_cpu() -> Iterator[None]:
    """torch's CUDA attention operators, with their real schemas, computed by plain softmax on the CPU."""

    # fmt: off
    def flash_forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        seqused_k=None, **_unused,
    ):
        if cum_seq_q is not None and max_q == 1 and q.shape[1] > k.shape[1]:
            _as_decoding(q, k, cum_seq_q)
        assert cum_seq_q is not None or seqused_k is None, "the operator reads it in variable-length calls only"
        out, lse = forward(q, k, v, (cum_seq_q, cum_seq_k, max_q, max_k), scale, is_causal, seqused_k)
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def flash_backward(
        grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
        scale=None, **_unused,
    ):
        assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,)
        return backward(grad_out, q, k, v, out, lse, (cum_seq_q, cum_seq_k, max_q, max_k), scale, is_causal)

    def efficient_forward(
        q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout_p, mask_type, compute_lse=False, *, scale=None,
        seqlen_k=None, **_unused,
    ):
        assert q.shape[2] == k.shape[2] and mask_type in (0, 1) and compute_lse
        seed = torch.empty(0, dtype=torch.int64)
        if cu_q is None:
            out, lse = forward(q, k, v, (None,) * 4, scale, mask_type == 1)
            return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32)), seed, seed, q.shape[1], k.shape[1]
        out, lse = forward(q[0], k[0], v[0], (cu_q, cu_k, max_q, max_k), scale, mask_type == 1, seqlen_k)
        padded = lse.new_full((len(cu_q) - 1, q.shape[2], -(-max_q // 32) * 32), torch.inf)
        for index, rows in enumerate(segments(q.shape[1], None, cu_q, max_q)):
            padded[index, :, : rows.stop - rows.start] = lse[:, rows]
        return out[None], padded, seed, seed, max_q, max_k

    def efficient_backward(
        grad_out, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout_p, seed, offset, mask_type,
        bias_requires_grad, *, scale=None, **_unused,
    ):
        assert out.is_contiguous() and max_q <= q.shape[1] and max_k <= k.shape[1]
        rows_of = segments(q.shape[1], None, cu_q, max_q)
        assert lse.shape == (len(rows_of), q.shape[2], -(-max_q // 32) * 32) and lse.is_contiguous()
        lengths = [rows.stop - rows.start for rows in rows_of]
        # Rows of no query are read: infinity makes their probabilities 0.
        assert all(lse[i, :, length:].isposinf().all() for i, length in enumerate(lengths))
        packed = torch.cat([lse[i, :, :length] for i, length in enumerate(lengths)], dim=1).contiguous()
        grads = backward(
            grad_out[0], q[0], k[0], v[0], out[0], packed, (cu_q, cu_k, max_q, max_k), scale, mask_type == 1
        )
        return *(grad[None] for grad in grads), torch.empty(0)
    # fmt: on

    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        library.impl("_flash_attention_forward", flash_forward)
        library.impl("_flash_attention_backward", flash_backward)
        library.impl("_efficient_attention_forward", efficient_forward)
        library.impl("_efficient_attention_backward", efficient_backward)
        yield
    finally:
        library._destroy()

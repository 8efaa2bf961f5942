"""Log-probabilities and entropies as one kernel that reads the logits once, and their gradient as another one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = 4096
LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def row_statistics(  # type: ignore[no-untyped-def]
    logits, tokens, logprobs, entropies, stride, count, temperature, NUMBERS: tl.constexpr
):
    """A program: one row, NUMBERS at a time, relative to the highest so far; as many sums, added at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = LOWEST
    total = tl.zeros((NUMBERS,), tl.float32)
    weighted = tl.zeros((NUMBERS,), tl.float32)
    for start in range(0, count, NUMBERS):
        column = start + tl.arange(0, NUMBERS)
        z = tl.load(logits + column, mask=column < count, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.max(z, 0))
        share = tl.exp(z - higher)
        before = tl.exp(top - higher)
        # What was relative to ``top`` becomes relative to ``higher``. A logit of -inf has no share, and 0 log 0 is 0.
        weighted = before * (weighted + (top - higher) * total) + tl.where(share == 0.0, 0.0, share * (z - higher))
        total = before * total + share
        top = higher
    whole = tl.sum(total, 0)
    drawn = tl.load(logits + tl.load(tokens + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, drawn - top - tl.log(whole))
    # -sum p log p with log p = z - top - log(whole).
    tl.store(entropies + row, tl.log(whole) - tl.sum(weighted, 0) / whole)


@torch.library.custom_op("vlm_pg::token_statistics", mutates_args=())
def token_statistics(
    logits: torch.Tensor, temperature: float, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens and entropies in nats, both fp32 [n], of ``softmax(logits / temperature)``.

    Args:
        logits: [n, V] in any floating dtype, numbers of a row side by side; divided in fp32.
        tokens: int64 [n], contiguous.
    """
    logprobs, entropies = _results(logits)
    assert logits.stride(1) == 1
    if not len(logits):
        return logprobs, entropies
    with torch.cuda.device_of(logits):
        row_statistics[(len(logits),)](
            logits, tokens, logprobs, entropies, logits.stride(0), logits.shape[1], temperature, NUMBERS, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, entropies


@token_statistics.register_fake
def _(logits: torch.Tensor, temperature: float, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(logits)


def _results(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return logprobs, entropies


# fmt: off
@triton.jit
def row_gradients(  # type: ignore[no-untyped-def]
    logits, tokens, logprobs, negated, of_tokens, negated_entropies, of_entropies, out, stride, count, temperature,
    ENTROPIES: tl.constexpr, NUMBERS: tl.constexpr,
):
    # fmt: on
    """A program: NUMBERS of one row; out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = column < count
    logits += row * stride
    token = tl.load(tokens + row)
    # The log-sum-exp, from the one logit whose log-probability is known.
    whole = tl.load(logits + token).to(tl.float32) / temperature - tl.load(logprobs + row)
    given = tl.load(logits + column, mask=inside, other=float("-inf"))
    logprob = given.to(tl.float32) / temperature - whole
    share = tl.exp(logprob)
    factor = tl.load(negated + row)
    if ENTROPIES:
        # 0 log 0 is 0.
        above = tl.where(share == 0.0, 0.0, logprob - tl.load(negated_entropies + row))
        factor += above * tl.load(of_entropies + row)
    found = tl.where(column == token, tl.load(of_tokens + row).to(tl.float32), share * factor)
    tl.store(out + row * count + column, found.to(given.dtype), mask=inside)


@torch.library.custom_op("vlm_pg::logits_gradient", mutates_args=())
def logits_gradient(
    logits: torch.Tensor,
    temperature: float,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    negated: torch.Tensor,
    of_tokens: torch.Tensor,
    negated_entropies: torch.Tensor | None = None,
    of_entropies: torch.Tensor | None = None,
) -> torch.Tensor:
    """p_j (negated + (log p_j - negated_entropies) of_entropies) for every logit j, and ``of_tokens`` for the token.

    Args:
        logits, temperature, tokens: as ``token_statistics`` takes them; p = softmax(logits / temperature).
        logprobs: fp32 [n], of the tokens.
        negated: fp32 [n], the log-probabilities' gradients by -temperature.
        of_tokens: [n], the tokens' logits' gradients, in any floating dtype.
        negated_entropies, of_entropies: fp32 [n], and their gradients by temperature; None without gradients.

    Returns:
        As the logits.
    """
    out = _gradient(logits)
    assert logits.stride(1) == 1
    if not len(logits):
        return out
    entropies = (logprobs, logprobs) if negated_entropies is None else (negated_entropies, of_entropies)
    with torch.cuda.device_of(logits):
        row_gradients[(len(logits), triton.cdiv(logits.shape[1], NUMBERS))](
            logits, tokens, logprobs, negated, of_tokens, *entropies, out, logits.stride(0), logits.shape[1],
            temperature, negated_entropies is not None, NUMBERS, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@logits_gradient.register_fake
def _(logits: torch.Tensor, *_: object) -> torch.Tensor:
    return _gradient(logits)


def _gradient(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape)

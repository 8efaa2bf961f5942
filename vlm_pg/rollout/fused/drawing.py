"""Tokens drawn by inversion of the cumulative distribution, as two kernels: sums of runs, then one run of each row.

n rollouts, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Neighbours in the vocabulary that a row looks at together, and how many such runs a program of the first kernel sums.
RUN, RUNS = 256, 16
LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def run_sums(scores, sums, tops, stride, count, runs, chunks, RUN: tl.constexpr, RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program: RUNS runs of one row, relative to their highest score."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    run = chunk * RUNS + tl.arange(0, RUNS)
    token = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    z = tl.load(scores + row * stride + token, mask=token < count, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(tl.max(z, 1), 0), LOWEST)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(sums + row * runs + run, tl.sum(tl.exp(z - top), 1), mask=run < runs)


@triton.jit
def drawn(  # type: ignore[no-untyped-def]
    scores, uniform, sums, tops, tokens, logprobs, stride, count, runs, chunks,
    RUN: tl.constexpr, RUNS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A program: one row. ROOM >= runs. In fp64: fp32 rounds by more than many a token's probability."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    run = tl.arange(0, ROOM)
    here = run < runs
    tops_of_runs = tl.load(tops + row * chunks + run // RUNS, mask=here, other=LOWEST)
    top = tl.max(tops_of_runs, 0)
    given = tl.load(sums + row * runs + run, mask=here, other=0.0) * tl.exp(tops_of_runs - top)
    cumulative = tl.cumsum(given.to(tl.float64), 0)
    target = tl.load(uniform + row) * tl.max(cumulative, 0)
    # Runs of probability 0, whose cumulative sum equals their predecessor's, are stepped over, also behind the last.
    last = tl.max(tl.where(given > 0.0, run, 0), 0)
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last)
    before = tl.max(tl.where(run < chosen, cumulative, 0.0), 0)
    of_run = tl.sum(tl.where(run == chosen, given.to(tl.float64), 0.0), 0)
    share = (target - before) / of_run
    within_run = tl.arange(0, RUN)
    token = chosen * RUN + within_run
    z = tl.exp(tl.load(scores + token, mask=token < count, other=float("-inf")).to(tl.float32) - top)
    within = tl.cumsum(z.to(tl.float64), 0)
    passed = tl.sum((within <= share * tl.max(within, 0)).to(tl.int32), 0)
    found = chosen * RUN + tl.minimum(passed, tl.max(tl.where(z > 0.0, within_run, 0), 0))
    tl.store(tokens + row, found.to(tl.int64))
    # Logits that are not numbers show as such here, with the first token.
    whole = tl.log(tl.sum(given, 0))
    tl.store(logprobs + row, tl.load(scores + found).to(tl.float32) - top - whole)


@torch.library.custom_op("vlm_pg::draw_tokens", mutates_args=())
def draw_tokens(scores: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [n] of ``softmax(scores)`` and their log-probabilities fp32 [n].

    Args:
        scores: [n, V] in any floating dtype, numbers of a row side by side.
        uniform: fp64 [n] in [0, 1), contiguous.
    """
    tokens, logprobs = _results(scores)
    rows, count = scores.shape
    if not rows:
        return tokens, logprobs
    assert scores.stride(1) == 1 and uniform.is_contiguous() and uniform.dtype == torch.float64
    runs = triton.cdiv(count, RUN)
    chunks = triton.cdiv(runs, RUNS)
    sums, tops = (scores.new_empty(rows, each, dtype=torch.float32) for each in (runs, chunks))
    sizes = (scores.stride(0), count, runs, chunks, RUN, RUNS)
    with torch.cuda.device_of(scores):
        run_sums[(rows, chunks)](scores, sums, tops, *sizes, enable_fp_fusion=False)
        drawn[(rows,)](
            scores, uniform, sums, tops, tokens, logprobs, *sizes, triton.next_power_of_2(runs), enable_fp_fusion=False
        )
    return tokens, logprobs


@draw_tokens.register_fake
def _results(scores: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.new_empty(len(scores), dtype=torch.int64), scores.new_empty(len(scores), dtype=torch.float32)

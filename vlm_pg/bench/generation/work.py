"""Names of those who generate, and what each must do; known without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vlm_pg.bench.flops import forward_flops, parameter_count
from vlm_pg.bench.generation.grid import RolloutPoint
from vlm_pg.bench.shapes import LanguageShape
from vlm_pg.bench.work import Work, causal_pairs

# Reading all weights for one decoded token takes about as long as computing this many rows with them.
READ_ROWS = 16
# Prompt tokens that ours and continuous batching run at a time (rollout.prefill_tokens, max_batch_tokens).
PREFILL_TOKENS, CONTINUOUS_TOKENS = 16384, 1024


@dataclass(frozen=True)
class GenerationWork:
    """``prefill``: prompts, and the first token of every response. ``decode``: all others, in ``steps`` forward passes.

    ``kv_tokens``: most tokens whose keys and values are kept at one time.
    """

    prefill: Work
    decode: Work
    steps: int
    kv_tokens: int


def shared_generation(point: RolloutPoint) -> GenerationWork:
    """Every prompt once, all groups decoded together. The last token of a response is never read."""
    prefix, read = point.prefix, point.new_tokens - 1
    tokens = point.groups * prefix
    held = min(tokens, max(PREFILL_TOKENS, prefix))
    prefill = Work(tokens, point.groups * causal_pairs(prefix), point.rollouts, held, point.rollouts)
    kv_tokens = point.groups * (prefix + point.generations * read)
    return GenerationWork(prefill, _decode(point), read, kv_tokens)


def repeated_generation(point: RolloutPoint) -> GenerationWork:
    """Every prompt once per response, all in one batch."""
    prefix, read, rows = point.prefix, point.new_tokens - 1, point.rollouts
    prefill = Work(rows * prefix, rows * causal_pairs(prefix), rows, rows * prefix, rows)
    return GenerationWork(prefill, _decode(point), read, rows * (prefix + read))


def one_by_one_generation(point: RolloutPoint) -> GenerationWork:
    """As the shared work, one group after the other."""
    together = shared_generation(point)
    one = shared_generation(RolloutPoint(point.prefix, point.generations, point.new_tokens))
    prefill = Work(
        together.prefill.tokens,
        together.prefill.pairs,
        together.prefill.logit_rows,
        one.prefill.held_tokens,
        one.prefill.held_logit_rows,
    )
    return GenerationWork(prefill, together.decode, point.groups * one.steps, one.kv_tokens)


def continuous_generation(point: RolloutPoint) -> GenerationWork:
    """As the shared work; prompts go through in pieces."""
    shared = shared_generation(point)
    held = min(shared.prefill.tokens, max(CONTINUOUS_TOKENS, point.rollouts))
    prefill = Work(shared.prefill.tokens, shared.prefill.pairs, shared.prefill.logit_rows, held, point.rollouts)
    return GenerationWork(prefill, shared.decode, shared.steps, shared.kv_tokens)


def _decode(point: RolloutPoint) -> Work:
    read = point.new_tokens - 1
    pairs = point.rollouts * (read * point.prefix + causal_pairs(read))
    return Work(point.rollouts * read, pairs, point.rollouts * read, point.rollouts, point.rollouts)


OURS, ONE_BY_ONE = "ours", "ours-one-by-one"
# In the order in which they are measured when time is short.
GENERATION_WORK: dict[str, Callable[[RolloutPoint], GenerationWork]] = {
    OURS: shared_generation,
    "transformers-generate": repeated_generation,
    "transformers-continuous": continuous_generation,
    ONE_BY_ONE: one_by_one_generation,
}

GENERATION_DESCRIPTIONS = {
    OURS: "RolloutEngine.generate: each prompt encoded once, its keys and values kept once for its G responses, all "
    "groups decoded in one batch",
    "transformers-generate": "transformers' generate with the prompts repeated G times, which is what "
    "num_return_sequences=G does before its prefill (it refuses G > 1 with greedy decoding); dynamic cache; sdpa, on a "
    "GPU flash_attention_2 where installed",
    "transformers-continuous": "transformers' continuous batching, num_return_sequences=G: each prompt encoded once, "
    "then forked, full blocks of 256 tokens shared; on a GPU a cache that lets all rollouts decode together; on a CPU "
    f"{CONTINUOUS_TOKENS:,} tokens a pass and a cache of the blocks that the rollouts fill and one more for each: a "
    "step may read as many tokens as the cache has room for, every rollout counted at its whole length, so some "
    "rollouts take turns (faster there than all at once: a step's mask grows with the square of their number); its "
    "manager is made anew for every run, so that no prompt is found in its cache, and that is not timed, nor is, on a "
    "GPU, one generation for other prompts in which its graphs are captured",
    ONE_BY_ONE: "ours, one group after the other (only where there are several groups)",
}


def generation_flops(shape: LanguageShape, work: GenerationWork) -> float:
    """Operations of prefill and decoding."""
    return forward_flops(shape, work.prefill) + forward_flops(shape, work.decode)


def measurement_cost(shape: LanguageShape, work: GenerationWork) -> float:
    """Operations that take as long as one timed run, a whole one and one of a single token.

    Decoding few rows waits for the weights, so every step counts ``READ_ROWS`` rows more than it has.
    """
    reading = work.steps * READ_ROWS * 2 * parameter_count(shape)
    return 2 * forward_flops(shape, work.prefill) + forward_flops(shape, work.decode) + reading


def kv_bytes(shape: LanguageShape, work: GenerationWork, element_bytes: int) -> float:
    """Keys and values of all softmax-attention layers, at the end of generation."""
    return work.kv_tokens * 2 * shape.full_layers * shape.kv_heads * shape.head_dim * element_bytes


def expected_generation_bytes(shape: LanguageShape, work: GenerationWork, element_bytes: int) -> float:
    """Peak memory above the weights: keys and values, one layer's tensors for the tokens of a pass, fp32 logits."""
    heads = shape.heads * shape.head_dim
    per_token = 4 * shape.hidden + 3 * shape.intermediate + 3 * heads + 4 * shape.kv_heads * shape.head_dim
    layer = work.prefill.held_tokens * per_token * element_bytes
    logits = 3 * 4 * work.prefill.held_logit_rows * shape.vocab
    return kv_bytes(shape, work, element_bytes) + layer + logits


def generation_bounds(
    shape: LanguageShape, theirs: GenerationWork, ours: GenerationWork, element_bytes: int
) -> dict[str, float]:
    """How many times less ``ours`` is: prompt tokens encoded, operations, keys and values in memory."""
    return {
        "prefill_tokens": theirs.prefill.tokens / ours.prefill.tokens,
        "flops": generation_flops(shape, theirs) / generation_flops(shape, ours),
        "kv_bytes": kv_bytes(shape, theirs, element_bytes) / kv_bytes(shape, ours, element_bytes),
    }

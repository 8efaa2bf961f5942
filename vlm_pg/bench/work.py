"""How much there is to do: tokens, pairs that attend, rows of logits; with the prefix shared or repeated.

One response of R tokens is predicted by R rows: the prefix's last one and its own first R - 1. Its last token is
never read, so the least work reads R - 1 tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlm_pg.bench.evaluation.shown import Shown, head_tokens, tail_tokens
from vlm_pg.bench.grid import EvalPoint, RolloutPoint

# Response tokens that the chunked contestant computes at one time.
CHUNK_TOKENS = 1024
# Prompt tokens that ours and continuous batching run at a time (rollout.prefill_tokens, max_batch_tokens).
PREFILL_TOKENS, CONTINUOUS_TOKENS = 16384, 1024


@dataclass(frozen=True)
class Work:
    """Work of one forward pass.

    ``tokens`` go through the linear layers; ``pairs`` (query, key) meet in one attention layer; ``logit_rows`` go
    through the output head; ``held_tokens`` have their activations in memory at one time.
    """

    tokens: int
    pairs: int
    logit_rows: int
    held_tokens: int
    held_logit_rows: int


def causal_pairs(length: int) -> int:
    """Pairs in causal attention of a sequence to itself, the diagonal included."""
    return length * (length + 1) // 2


def shared_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The prefix of P tokens once, then every response behind it; ``lengths``: R of each, tokens."""
    own = [length - 1 for length in lengths]
    tokens = prefix + sum(own)
    pairs = causal_pairs(prefix) + sum(length * prefix + causal_pairs(length) for length in own)
    return Work(tokens, pairs, sum(lengths), tokens, sum(lengths))


def repeated_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The prefix once per response, all of them in one batch."""
    rows = [prefix + length - 1 for length in lengths]
    return Work(sum(rows), sum(map(causal_pairs, rows)), sum(lengths), sum(rows), sum(lengths))


def padded_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The repeated work, every sequence as long as the longest, as in a rectangular batch."""
    return repeated_work(prefix, [max(lengths)] * len(lengths))


def sequential_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The repeated work, but only one sequence is held at a time."""
    longest = max(lengths)
    return replace(repeated_work(prefix, lengths), held_tokens=prefix + longest - 1, held_logit_rows=longest)


def chunked_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The shared work, but only the prefix and one chunk of responses are held at a time."""
    chunk = min(sum(lengths), max(CHUNK_TOKENS, max(lengths)))
    return replace(shared_work(prefix, lengths), held_tokens=prefix + chunk, held_logit_rows=chunk)


def whole_logits_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The prefix once, the responses' last tokens read too, and logits for every token."""
    tokens = prefix + sum(lengths)
    pairs = causal_pairs(prefix) + sum(length * prefix + causal_pairs(length) for length in lengths)
    return Work(tokens, pairs, tokens, tokens, tokens)


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
    return GenerationWork(prefill, _decode(point), read, point.groups * (prefix + point.generations * read))


def repeated_generation(point: RolloutPoint) -> GenerationWork:
    """Every prompt once per response, all in one batch."""
    prefix, read, rows = point.prefix, point.new_tokens - 1, point.rollouts
    prefill = Work(rows * prefix, rows * causal_pairs(prefix), rows, rows * prefix, rows)
    return GenerationWork(prefill, _decode(point), read, rows * (prefix + read))


def one_by_one_generation(point: RolloutPoint) -> GenerationWork:
    """As the shared work, one group after the other."""
    together, one = shared_generation(point), shared_generation(replace(point, groups=1))
    held = replace(together.prefill, held_tokens=one.prefill.held_tokens, held_logit_rows=one.prefill.held_logit_rows)
    return GenerationWork(held, together.decode, point.groups * one.steps, one.kv_tokens)


def continuous_generation(point: RolloutPoint) -> GenerationWork:
    """As the shared work; prompts go through in pieces."""
    shared = shared_generation(point)
    held = min(shared.prefill.tokens, max(CONTINUOUS_TOKENS, point.rollouts))
    return replace(shared, prefill=replace(shared.prefill, held_tokens=held))


def _decode(point: RolloutPoint) -> Work:
    read, rows = point.new_tokens - 1, point.rollouts
    return Work(rows * read, rows * (read * point.prefix + causal_pairs(read)), rows * read, rows, rows)


@dataclass(frozen=True)
class EvalWork:
    """``generation``: of all questions. ``towers``: how often a whole video goes through the vision tower."""

    generation: GenerationWork
    towers: int


def shared_evaluation(point: EvalPoint) -> EvalWork:
    """Every video once, behind it each of its questions once, behind that the answers; all decoded together."""
    return _shared_evaluation(point.videos, point)


def apart_evaluation(point: EvalPoint) -> EvalWork:
    """The same, each question on a video of its own."""
    return _shared_evaluation(point.asked, point)


def repeated_evaluation(point: EvalPoint) -> EvalWork:
    """One question after the other: its video once through the tower, its whole prompt once per answer."""
    prompt = _prompt_tokens(point)
    one = repeated_generation(RolloutPoint(prompt, point.generations, point.new_tokens))
    prefill, decode = (_times(work, point.asked) for work in (one.prefill, one.decode))
    return EvalWork(replace(one, prefill=prefill, decode=decode, steps=point.asked * one.steps), point.asked)


def batched_evaluation(point: EvalPoint) -> EvalWork:
    """The same, all questions decoded together."""
    prompt = _prompt_tokens(point)
    return EvalWork(
        repeated_generation(RolloutPoint(prompt, point.generations, point.new_tokens, point.asked)), point.asked
    )


def _shared_evaluation(videos: int, point: EvalPoint) -> EvalWork:
    begun, tail, read = head_tokens() + Shown.of(point.prefix).visual_tokens, tail_tokens(), point.new_tokens - 1
    tokens = videos * begun + point.asked * tail
    pairs = videos * causal_pairs(begun) + point.asked * (tail * begun + causal_pairs(tail))
    rollouts = point.asked * point.generations
    held = min(tokens, max(PREFILL_TOKENS, begun))
    decode = _decode(RolloutPoint(begun + tail, point.generations, point.new_tokens, point.asked))
    prefill = Work(tokens, pairs, rollouts, held, rollouts)
    return EvalWork(GenerationWork(prefill, decode, read, tokens + rollouts * read), videos)


def _prompt_tokens(point: EvalPoint) -> int:
    return head_tokens() + Shown.of(point.prefix).visual_tokens + tail_tokens()


def _times(work: Work, count: int) -> Work:
    """The same work one after the other: no more is held."""
    return replace(work, tokens=count * work.tokens, pairs=count * work.pairs, logit_rows=count * work.logit_rows)

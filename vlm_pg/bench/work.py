"""How much there is to do: tokens, pairs that attend, rows of logits; with the prefix shared or repeated.

One response of R tokens is predicted by R rows: the prefix's last one and its own first R - 1. Its last token is
never read, so the least work reads R - 1 tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from vlm_pg.batching.plan import chunk_responses
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
class ForwardDone:
    """What a contestant computes in forward passes, to the row: what it leaves out and what it pads.

    ``tokens`` go through all layers but the last, ``last_rows`` through the last one; ``last_keys`` further rows owe it
    their keys and values alone. ``pairs`` are computed in a layer, ``last_pairs`` in the last one.
    """

    tokens: int
    last_rows: int
    last_keys: int
    pairs: int
    last_pairs: int
    logit_rows: int


@dataclass(frozen=True)
class StepDone(ForwardDone):
    """Of `bench step`, also what it computes twice.

    ``logit_rows_again``: rows whose logits are computed a second time in backward. ``attention_kept``: checkpointing
    does not repeat attention.
    """

    logit_rows_again: int
    attention_kept: bool


def grouped_done(prefix: int, lengths: Sequence[int], chunk_rows: int, masked: bool = False) -> StepDone:
    """Ours: in the last layer only rows that are read ask: the prefix's last one, and the responses'.

    Args:
        chunk_rows: rows of logits that are held at a time; where there are more, all are computed again in backward.
        masked: whether attention behind a prefix computes pairs that a mask hides; ours never does.
    """
    return _grouped_done(prefix, lengths, _again([sum(lengths)], chunk_rows))


def chunked_done(prefix: int, lengths: Sequence[int], chunk_rows: int, masked: bool = False) -> StepDone:
    """The same, response tokens in chunks; as ``grouped_done``."""
    chunks = chunk_responses([[length - 1 for length in lengths]], [0], CHUNK_TOKENS)
    rows = [sum(lengths[index] for piece in chunk for index in piece.responses) for chunk in chunks]
    return _grouped_done(prefix, lengths, _again(rows, chunk_rows))


def repeated_done(prefix: int, lengths: Sequence[int], chunk_rows: int, masked: bool = False) -> StepDone:
    """transformers', one sequence after the other; as ``grouped_done``."""
    return _everywhere(repeated_work(prefix, lengths))


def padded_done(prefix: int, lengths: Sequence[int], chunk_rows: int, masked: bool = False) -> StepDone:
    """transformers', in one batch; as ``grouped_done``."""
    return _everywhere(padded_work(prefix, lengths))


def prefix_grouper_done(prefix: int, lengths: Sequence[int], chunk_rows: int, masked: bool = False) -> StepDone:
    """prefix_grouper without last tokens; padding is left out of linear layers and computed in attention.

    ``masked``: on a CPU and in fp32; as ``grouped_done``.
    """
    again = _again([sum(lengths)], chunk_rows)
    return _prefix_grouper(prefix, [length - 1 for length in lengths], masked, sum(lengths), again)


def prefix_grouper_readme_done(prefix: int, lengths: Sequence[int], chunk_rows: int, masked: bool = False) -> StepDone:
    """prefix_grouper as its README says, logits of all tokens; as ``prefix_grouper_done``."""
    return _prefix_grouper(prefix, lengths, masked, prefix + sum(lengths), 0)


def _grouped_done(prefix: int, lengths: Sequence[int], again: int) -> StepDone:
    work, own = shared_work(prefix, lengths), sum(length - 1 for length in lengths)
    # Of the prefix's pairs only its last row's are needed in the last layer.
    last_pairs = work.pairs - causal_pairs(prefix) + prefix
    return StepDone(work.tokens, own + 1, prefix - 1, work.pairs, last_pairs, work.logit_rows, again, True)


def _everywhere(work: Work) -> StepDone:
    return StepDone(work.tokens, work.tokens, 0, work.pairs, work.pairs, work.logit_rows, 0, False)


def _prefix_grouper(prefix: int, own: Sequence[int], masked: bool, logit_rows: int, again: int) -> StepDone:
    longest, tokens = max(own), prefix + sum(own)
    each = longest * (prefix + longest) if masked else longest * prefix + causal_pairs(longest)
    pairs = causal_pairs(prefix) + len(own) * each
    return StepDone(tokens, tokens, 0, pairs, pairs, logit_rows, again, False)


def _again(rows: Sequence[int], chunk_rows: int) -> int:
    return sum(count for count in rows if count > chunk_rows)


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


def shared_generation_done(point: RolloutPoint, decode_rows: int | None = None) -> ForwardDone:
    """Ours, to the row: in the last layer prompts compute what decoding reads, where a pass begins at their start.

    Nothing is asked there but each prompt's last row (of a pass that ends no prompt, its first piece's last); all rows
    ask in a pass that begins within a prompt. Prompts have no tokens in common.

    Args:
        decode_rows: of a decode step, where there are idle ones among them (``rollout/ragged.py``); an idle row has one
            own token, meets no prompt and has no logits. Default: one for each rollout.
    """
    tokens = pairs = last_rows = last_pairs = 0
    for pieces in _prefill_passes(point):
        met = [(stop - start) * start + causal_pairs(stop - start) for start, stop in pieces]
        rows = sum(stop - start for start, stop in pieces)
        tokens, pairs = tokens + rows, pairs + sum(met)
        if any(start for start, _ in pieces):
            last_rows, last_pairs = last_rows + rows, last_pairs + sum(met)
        else:
            read = [stop for _, stop in pieces if stop == point.prefix] or [pieces[0][1]]
            last_rows, last_pairs = last_rows + len(read), last_pairs + sum(read)
    last_keys = tokens - last_rows
    decode, idle = _decode(point), 0
    if decode_rows is not None:
        idle = (decode_rows - point.rollouts) * (point.new_tokens - 1)
    later, met_later = decode.tokens + idle, decode.pairs + idle
    return ForwardDone(
        tokens + later,
        last_rows + later,
        last_keys,
        pairs + met_later,
        last_pairs + met_later,
        point.rollouts * point.new_tokens,
    )


def one_by_one_generation_done(point: RolloutPoint, decode_rows: int | None = None) -> ForwardDone:
    """The same, one group after the other; ``decode_rows``: of one group."""
    one = shared_generation_done(replace(point, groups=1), decode_rows)
    return ForwardDone(*(point.groups * getattr(one, field.name) for field in fields(one)))


def repeated_generation_done(point: RolloutPoint, decode_rows: int | None = None) -> ForwardDone:
    """transformers' generate: every row through every layer, logits of what is read."""
    work = repeated_generation(point)
    tokens, pairs = (work.prefill.tokens + work.decode.tokens, work.prefill.pairs + work.decode.pairs)
    return ForwardDone(tokens, tokens, 0, pairs, pairs, work.prefill.logit_rows + work.decode.logit_rows)


def _prefill_passes(point: RolloutPoint) -> list[list[tuple[int, int]]]:
    """Of each pass the pieces of prompts, (first token, end): prompts in order, ``PREFILL_TOKENS`` a pass."""
    passes: list[list[tuple[int, int]]] = [[]]
    room = PREFILL_TOKENS
    for _ in range(point.groups):
        start = 0
        while start < point.prefix:
            if not room:
                passes.append([])
                room = PREFILL_TOKENS
            stop = min(point.prefix, start + room)
            passes[-1].append((start, stop))
            start, room = stop, room - (stop - start)
    return passes


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

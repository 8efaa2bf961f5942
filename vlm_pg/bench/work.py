"""How much there is to do for one group: tokens, pairs that attend, rows of logits; with the prefix shared or repeated.

One response of R tokens is predicted by R rows: the prefix's last one and its own first R - 1. Its last token is
never read, so the least work reads R - 1 tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Response tokens that the chunked contestant computes at one time.
CHUNK_TOKENS = 1024


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


def shared_work(prefix: int, lengths: Sequence[int], full_squares: bool = False) -> Work:
    """The prefix once, then every response behind it.

    Args:
        prefix: P, tokens.
        lengths: R of each response, tokens.
        full_squares: count masked pairs too, as FLOP profilers do.
    """
    own = [length - 1 for length in lengths]
    tokens = prefix + sum(own)
    if full_squares:
        pairs = prefix**2 + sum(length * (prefix + length) for length in own)
    else:
        pairs = causal_pairs(prefix) + sum(length * prefix + causal_pairs(length) for length in own)
    return Work(tokens, pairs, sum(lengths), tokens, sum(lengths))


def repeated_work(prefix: int, lengths: Sequence[int], padded: bool = False, full_squares: bool = False) -> Work:
    """The prefix once per response, all of them in one batch.

    ``padded``: every sequence is as long as the longest, as in a rectangular batch.
    """
    if padded:
        lengths = [max(lengths)] * len(lengths)
    rows = [prefix + length - 1 for length in lengths]
    pairs = sum(row**2 if full_squares else causal_pairs(row) for row in rows)
    return Work(sum(rows), pairs, sum(lengths), sum(rows), sum(lengths))


def sequential_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The repeated work, but only one sequence is held at a time."""
    work = repeated_work(prefix, lengths)
    return Work(work.tokens, work.pairs, work.logit_rows, prefix + max(lengths) - 1, max(lengths))


def chunked_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The shared work, but only the prefix and one chunk of responses are held at a time."""
    work = shared_work(prefix, lengths)
    chunk = min(sum(lengths), max(CHUNK_TOKENS, max(lengths)))
    return Work(work.tokens, work.pairs, work.logit_rows, prefix + chunk, chunk)


def whole_logits_work(prefix: int, lengths: Sequence[int]) -> Work:
    """The prefix once, the responses' last tokens read too, and logits for every token."""
    tokens = prefix + sum(lengths)
    pairs = causal_pairs(prefix) + sum(length * prefix + causal_pairs(length) for length in lengths)
    return Work(tokens, pairs, tokens, tokens, tokens)

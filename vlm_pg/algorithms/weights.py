"""What one response token counts for in the loss.

The weights are fixed for the whole optimizer batch, over all ranks, before anything is cut into micro-batches. The loss
is then a plain weighted sum, and how tokens are split cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from vlm_pg.algorithms.settings import LossAverage


def response_token_weights(
    lengths: Sequence[int],
    average: LossAverage,
    total_tokens: int,
    total_sequences: int,
    max_new_tokens: int,
    kept: Sequence[float] | None = None,
) -> list[float]:
    """Weight that each token of each response gets.

    ``token_mean``: 1 / total_tokens (every token counts the same). ``sequence_mean``: 1 / (length * total_sequences)
    (every response counts the same). ``sequence_sum``: 1 / total_sequences. ``constant_length``: 1 / (max_new_tokens *
    total_sequences) (Dr. GRPO, arXiv 2503.20783: a token counts the same in long and in short responses, and from step
    to step). Summed over all tokens of the optimizer batch the first two give 1.

        lengths = [2, 3], totals 5 and 2, at most 10 tokens:
        token_mean -> [1/5, 1/5]   sequence_mean -> [1/4, 1/6]   sequence_sum -> [1/2, 1/2]
        constant_length -> [1/20, 1/20]

    The totals count what trains: the responses, on all ranks, whose ``kept`` is not 0. So a masked response is as if
    it had not been sampled, and of pruned ones the kept count for more. Where ``kept`` holds inverse probabilities of
    having been kept (``prune`` with correction), the totals count the dropped ones too: the inverse probabilities
    already make up for them.

    Args:
        lengths: response tokens of each sequence held here (this rank, this micro-batch), each at least 1.
        average: one of ``LossAverage``.
        total_tokens: response tokens of the whole optimizer batch on all ranks.
        total_sequences: responses of the whole optimizer batch on all ranks.
        max_new_tokens: most tokens a response may have.
        kept: factor of each sequence, at least 0; 0 for one that does not train; None: 1 for all.

    Returns:
        One weight per sequence; 0.0 where ``kept`` is 0.

    Raises:
        ValueError: a length or ``max_new_tokens`` below 1, factors that are negative or not one per sequence, totals
            smaller than what the sequences that train add up to, or an unknown average.
    """
    factors = [1.0] * len(lengths) if kept is None else list(kept)
    _require_valid(lengths, average, max_new_tokens, factors)
    training = [length for length, factor in zip(lengths, factors, strict=True) if factor > 0]
    if total_tokens < sum(training) or total_sequences < len(training):
        raise ValueError(
            f"Totals are {total_tokens} tokens and {total_sequences} sequences. They must cover at least the "
            f"{sum(training)} tokens and {len(training)} sequences given that train. Pass the totals of the whole "
            "optimizer batch, summed over all ranks."
        )
    divisors: dict[LossAverage, list[int]] = {
        "token_mean": [total_tokens] * len(lengths),
        "sequence_mean": [length * total_sequences for length in lengths],
        "sequence_sum": [total_sequences] * len(lengths),
        "constant_length": [max_new_tokens * total_sequences] * len(lengths),
    }
    return [factor / divisor if factor > 0 else 0.0 for factor, divisor in zip(factors, divisors[average], strict=True)]


def _require_valid(lengths: Sequence[int], average: LossAverage, max_new_tokens: int, factors: Sequence[float]) -> None:
    if average not in get_args(LossAverage):
        raise ValueError(
            f"Unknown loss average {average!r}. Allowed are {', '.join(get_args(LossAverage))}. "
            "Set algorithm.loss_average to one of them."
        )
    if any(length < 1 for length in lengths):
        raise ValueError(
            f"Response lengths are {list(lengths)}. Each must be at least 1 token. Leave empty responses out."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}. It must be at least 1. Set rollout.max_new_tokens.")
    if len(factors) != len(lengths) or not all(factor >= 0 for factor in factors):
        raise ValueError(
            f"Factors of {len(lengths)} sequences are {list(factors)}. There must be one for each, at least 0. "
            "Pass 0 for a sequence that does not train and 1 for one that does."
        )

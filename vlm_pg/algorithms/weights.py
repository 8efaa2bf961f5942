"""What one response token counts for in the loss.

The weights are fixed for the whole optimizer batch, over all ranks, before anything is cut into micro-batches. The loss
is then a plain weighted sum, and how tokens are split cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from vlm_pg.algorithms.settings import LossAverage


def response_token_weights(
    lengths: Sequence[int], average: LossAverage, total_tokens: int, total_sequences: int
) -> list[float]:
    """Weight that each token of each response gets.

    ``token_mean``: 1 / total_tokens (every token counts the same). ``sequence_mean``: 1 / (length * total_sequences)
    (every response counts the same). Summed over all tokens of the optimizer batch the weights give 1.

        lengths = [2, 3], totals 5 and 2:   token_mean -> [1/5, 1/5]   sequence_mean -> [1/4, 1/6]

    Args:
        lengths: response tokens of each sequence held here (this rank, this micro-batch), each at least 1.
        average: ``"token_mean"`` or ``"sequence_mean"``.
        total_tokens: response tokens of the whole optimizer batch on all ranks.
        total_sequences: responses of the whole optimizer batch on all ranks.

    Returns:
        One weight per sequence.

    Raises:
        ValueError: a length below 1, totals smaller than what ``lengths`` alone adds up to, or an unknown average.
    """
    if average not in get_args(LossAverage):
        raise ValueError(
            f"Unknown loss average {average!r}. Allowed are {', '.join(get_args(LossAverage))}. "
            "Set algorithm.loss_average to one of them."
        )
    if any(length < 1 for length in lengths):
        raise ValueError(
            f"Response lengths are {list(lengths)}. Each must be at least 1 token. Leave empty responses out."
        )
    if total_tokens < sum(lengths) or total_sequences < len(lengths):
        raise ValueError(
            f"Totals are {total_tokens} tokens and {total_sequences} sequences. They must cover at least the "
            f"{sum(lengths)} tokens and {len(lengths)} sequences given. Pass the totals of the whole optimizer batch, "
            "summed over all ranks."
        )
    if average == "token_mean":
        return [1.0 / total_tokens for _ in lengths]
    return [1.0 / (length * total_sequences) for length in lengths]

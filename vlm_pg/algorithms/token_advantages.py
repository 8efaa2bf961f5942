"""Advantages by token: what the KL takes from each, and whitening over all response tokens of a step.

Shape letters: R tokens of one response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vlm_pg.algorithms.scales import WHITEN_EPSILON

# Relative, with room for a few operations; also of a token's log-probability, which is of the order of 1 to 10 nats.
FP32_ROUNDING = 1e-6


def kl_returns(kl: torch.Tensor, coef: float) -> torch.Tensor:
    """What each token's advantage loses to the KL of itself and all tokens after it (REINFORCE++, section 3).

        kl_returns([1, 2, 3], 0.1) -> [-0.6, -0.5, -0.3]

    Args:
        kl: [R] KL estimate of each token of one response, in nats, without graph.
        coef: weight of the KL.

    Returns:
        [R] -coef * sum of kl[s] over s >= t.
    """
    return -coef * kl.flip(0).cumsum(0).flip(0)


def moments(values: Sequence[torch.Tensor]) -> tuple[float, float, float]:
    """(count, sum, sum of squares) of all elements, in float64; those of several ranks may be added up."""
    wide = [tensor.double() for tensor in values]
    return (
        float(sum(tensor.numel() for tensor in wide)),
        math.fsum(tensor.sum().item() for tensor in wide),
        math.fsum(tensor.square().sum().item() for tensor in wide),
    )


def mean_and_std(count: float, total: float, squares: float) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor count - 1) from added-up ``moments``; 0 of a single value or none."""
    mean = total / count if count else 0.0
    # Rounding may leave slightly less than 0 where all values are equal.
    variance = max(0.0, squares - total * mean) / (count - 1) if count > 1 else 0.0
    return mean, math.sqrt(variance)


def whitened(values: torch.Tensor, mean: float, std: float, rounding: float) -> torch.Tensor:
    """(values - mean) / (std + 1e-8): token advantages whitened over all response tokens of a step.

    Zeros where the deviation is rounding and nothing else: divided by itself it would be a full-size update.

    Args:
        values: any shape.
        mean: of all tokens of the step on all ranks, see ``mean_and_std``.
        std: their sample standard deviation.
        rounding: deviation that equal rewards may have, see ``token_rounding``.
    """
    return values * 0.0 if std <= rounding else (values - mean) / (std + WHITEN_EPSILON)


def token_rounding(largest: float, kl_coef: float, longest: int) -> float:
    """How far token advantages may lie apart by rounding alone: of fp32, and of the KL's log-probabilities.

    Args:
        largest: absolute value of the step's largest advantage before the KL is taken away.
        kl_coef: weight of the KL, which sums up over a response.
        longest: tokens of the longest response.
    """
    return FP32_ROUNDING * (largest + kl_coef * longest)

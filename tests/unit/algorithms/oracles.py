"""Random batches of tokens and central differences, for the losses' tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def random_batch(seed: int, num_tokens: int, spread: float = 0.5) -> tuple[torch.Tensor, ...]:
    """Policy and behaviour log-probabilities, advantages and weights, float64 [num_tokens]."""
    generator = np.random.default_rng(seed)
    behaviour = -generator.exponential(1.0, num_tokens)
    policy = behaviour + spread * generator.standard_normal(num_tokens)
    advantages = generator.standard_normal(num_tokens)
    weights = generator.uniform(0.01, 1.0, num_tokens)
    return tuple(torch.from_numpy(array) for array in (policy, behaviour, advantages, weights))


def random_lengths(seed: int, num_tokens: int) -> list[int]:
    """Lengths of sequences, each at least 1, that add up to ``num_tokens``."""
    generator = np.random.default_rng([seed, 1])
    cuts = np.flatnonzero(generator.random(num_tokens - 1) < 0.3) + 1
    return np.diff([0, *cuts, num_tokens]).tolist()


def central_differences(
    function: Callable[[torch.Tensor], torch.Tensor], point: torch.Tensor, step: float = 1e-6
) -> torch.Tensor:
    """Gradient of ``function``, a scalar, at ``point``."""
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        shift = torch.zeros_like(point)
        shift[index] = step
        gradient[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return gradient

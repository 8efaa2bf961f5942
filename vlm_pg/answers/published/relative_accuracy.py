"""Mean relative accuracy (MRA) as two published codes compute it; they differ where the error equals a threshold."""

from __future__ import annotations

import numpy as np

_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# As torch.arange(0.5, 0.975, 0.05) has them: computed in double precision, kept in single.
_SINGLE = (0.5 + 0.05 * np.arange(10)).astype(np.float32)
_EPSILON = np.float32(1e-8)


def relative_accuracy_or_equal(predicted: float, gold: float) -> float:
    """Share of the thresholds t = .50, .55, ..., .95 with |p - g| / g <= 1 - t: VSI-Bench's code and lmms-eval.

    3 for a gold 4 earns 0.6, and 5 for 10 earns 0.1. ``gold`` is not 0.
    """
    return float(np.mean(abs(predicted - gold) / gold <= 1 - _THRESHOLDS))


def relative_accuracy_below(predicted: float, gold: float) -> float:
    """Share of the thresholds with |p - g| / |g| < 1 - t, in single precision: Video-R1.

    3 for a gold 4 earns 0.5, and 5 for 10 earns 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        single_gold = np.float32(gold)
        error = np.abs(np.float32(predicted) - single_gold) / (np.abs(single_gold) + _EPSILON)
    return float(np.mean(error < np.float32(1) - _SINGLE))

"""Which samples a training step uses: a pure function of the step, so that resuming needs no saved position."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np


def indices_for_step(num_samples: int, prompts_per_step: int, step: int, seed: int, shuffle: bool) -> list[int]:
    """Indices of the samples of step ``step`` (from 0).

    The epochs follow each other without a gap: every sample is used once per epoch, and a step may hold the end of one
    epoch and the beginning of the next.

        indices_for_step(5, 3, 1, seed=0, shuffle=False) == [3, 4, 0]

    Raises:
        ValueError: there are no samples.
    """
    if num_samples < 1:
        raise ValueError(f"There are {num_samples} usable samples; at least one is needed. Check the data file.")
    first = step * prompts_per_step
    indices = []
    for place in range(first, first + prompts_per_step):
        epoch, offset = divmod(place, num_samples)
        indices.append(int(_permutation(num_samples, seed, epoch)[offset]) if shuffle else offset)
    return indices


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch. Sorts raw Philox output: numpy promises to keep it, unlike ``Generator.permutation``."""
    key = int.from_bytes(hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()[:16], "big")
    return np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")

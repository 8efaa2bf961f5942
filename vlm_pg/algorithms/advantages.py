"""Rewards of one group to advantages (GRPO, arXiv 2402.03300, equation 3; without scaling: Dr. GRPO, 2503.20783)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from vlm_pg.algorithms.settings import AdvantageScale

STD_EPSILON = 1e-4


def group_advantages(rewards: Sequence[float | None], scale: AdvantageScale) -> list[float]:
    """Advantage of each rollout of one complete group.

    A_i = (r_i - mean) / (std + 1e-4) with ``scale="std"``, A_i = r_i - mean with ``"none"``. ``std`` is the sample
    standard deviation (divisor n - 1). A reward of None ("no value") is left out of mean and std and gets advantage 0,
    so it trains nothing. Fewer than two valued rewards, or rewards that are all equal, give exactly 0 for everyone:
    such a group says nothing about which rollout was better.

        group_advantages([1.0, 0.0, None, 0.5], "none") -> [0.5, -0.5, 0.0, 0.0]

    Args:
        rewards: total reward of each of the group's G rollouts, None where it could not be computed.
        scale: ``"std"`` or ``"none"``.

    Returns:
        G advantages, in the order of ``rewards``.

    Raises:
        ValueError: a reward is not finite, or ``scale`` is unknown.
    """
    if scale not in get_args(AdvantageScale):
        raise ValueError(
            f"Unknown advantage scale {scale!r}. Allowed are {', '.join(get_args(AdvantageScale))}. "
            "Set algorithm.scale_advantages to one of them."
        )
    valued = [reward for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in valued):
        raise ValueError(
            f"Rewards of one group are {list(rewards)}. Each must be a finite number or None. "
            "Return None from a reward that cannot be computed."
        )
    if len(valued) < 2 or min(valued) == max(valued):
        return [0.0] * len(rewards)
    mean = math.fsum(valued) / len(valued)
    divisor = 1.0
    if scale == "std":
        squares = math.fsum((reward - mean) ** 2 for reward in valued)
        divisor = math.sqrt(squares / (len(valued) - 1)) + STD_EPSILON
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards]

"""Rewards: parts of a reward, the user's functions, a judge, and the rewarder that scores a step's responses."""

from __future__ import annotations

from vlm_pg.rewards.parts import Response
from vlm_pg.rewards.rewarder import Rewarder, score
from vlm_pg.rewards.settings import RewardSettings

__all__ = ["Response", "RewardSettings", "Rewarder", "score"]

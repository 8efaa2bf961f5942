"""Rewards: one answer kind per file, the rubric that weighs them, and the rewarder that scores a step's responses."""

from __future__ import annotations

from vlm_pg.rewards.response import Response
from vlm_pg.rewards.rewarder import Rewarder, score
from vlm_pg.rewards.settings import RewardSettings

__all__ = ["Response", "RewardSettings", "Rewarder", "score"]

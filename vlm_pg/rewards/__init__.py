"""Rewards: one answer kind per file, and the rubric that weighs them. ``score`` is the whole interface."""

from __future__ import annotations

from vlm_pg.rewards.rubric import score
from vlm_pg.rewards.settings import RewardSettings

__all__ = ["RewardSettings", "score"]

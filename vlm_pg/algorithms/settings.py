"""Settings of the policy-gradient algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlm_pg.settings import Settings

AdvantageScale = Literal["std", "none"]
LossAverage = Literal["token_mean", "sequence_mean"]


class AlgorithmSettings(Settings):
    """GRPO and the members of its family that differ from it by these numbers only."""

    scale_advantages: AdvantageScale = Field(
        default="std",
        description="How rewards become advantages inside one group of rollouts. std: (r - mean) / (std + 1e-4), "
        "std being the sample standard deviation (divisor n - 1). none: r - mean.",
    )
    clip_low: float = Field(
        default=0.2, ge=0.0, le=1.0, description="The probability ratio is clipped from below at 1 - clip_low."
    )
    clip_high: float = Field(
        default=0.2,
        ge=0.0,
        le=10.0,
        description="The probability ratio is clipped from above at 1 + clip_high; larger than clip_low is DAPO's "
        "clip-higher.",
    )
    kl_coef: float = Field(
        default=0.0,
        ge=0.0,
        le=10.0,
        description="Weight of the KL term exp(-d) - 1 + d, d = policy - reference log-probability. 0 loads no "
        "reference model.",
    )
    loss_average: LossAverage = Field(
        default="token_mean",
        description="What one response token counts for in the whole optimizer batch. token_mean: 1 / tokens. "
        "sequence_mean: 1 / (tokens of its response * responses).",
    )
    log_ratio_clamp: float = Field(
        default=20.0,
        gt=0.0,
        le=80.0,
        description="Log-ratios are held within +- this before they are exponentiated (80 still fits float32).",
    )

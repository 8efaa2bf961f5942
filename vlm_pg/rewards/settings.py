"""Settings of the reward."""

from __future__ import annotations

from pydantic import Field

from vlm_pg.settings import Settings


class RewardSettings(Settings):
    """reward = accuracy_weight * accuracy + format_weight * format; both parts lie in [0, 1]."""

    accuracy_weight: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="Weight of the answer's accuracy. 0 reports it without training on it.",
    )
    format_weight: float = Field(
        default=0.1,
        ge=0.0,
        le=100.0,
        description="Weight of the format: 1 for exactly one think block followed by one answer block, else 0.",
    )
    numerical_decimal_places: int = Field(
        default=2, ge=0, le=12, description="Numbers are equal if they are equal after rounding to this many places."
    )
    max_answer_characters: int = Field(
        default=4096,
        ge=1,
        le=100_000,
        description="An answer block longer than this is scored wrong without being read, with a note that says so.",
    )

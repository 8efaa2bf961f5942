"""How answers are sampled."""

from __future__ import annotations

from pydantic import Field

from vlm_pg.settings import Settings


class RolloutSettings(Settings):
    """Section ``rollout``."""

    num_generations: int = Field(8, ge=1, le=1024, description="Rollouts per question, G.")
    max_new_tokens: int = Field(768, ge=1, description="Longest response, in tokens, the stop token included.")
    temperature: float = Field(1.0, ge=0.0, le=100.0, description="Softmax temperature; 0 is greedy (evaluation only).")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Keep the smallest set of tokens with this probability.")
    top_k: int = Field(0, ge=0, description="Keep the k most probable tokens; 0 keeps all.")
    max_batch_rollouts: int = Field(
        256, ge=1, description="Rollouts decoded together; several groups are decoded in one batch up to this number."
    )

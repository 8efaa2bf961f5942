"""The learning rate as a function of the step alone, so that resuming needs no state."""

from __future__ import annotations

import math

from vlm_pg.training.settings import TrainingSettings


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 1.

    Linear warm-up over ``warmup_steps`` (the first step already moves), then constant, linear or cosine decay that
    reaches ``min_learning_rate_ratio`` of the peak at the last step.
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    falling = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * falling)

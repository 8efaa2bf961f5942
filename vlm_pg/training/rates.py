"""Learning rates of the model's parts and of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import Part
from vlm_pg.training.settings import TrainingSettings


def trained_weights(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and weights, in the model's order."""
    return [(name, weight) for name, weight in policy.model.named_parameters() if weight.requires_grad]


class PartRates:
    """Groups of trained weights with one learning rate, in the order of the model's parts; parts of equal rates are one
    group."""

    def __init__(self, policy: Policy, settings: TrainingSettings):
        self._of_name = policy.family.part_of
        self.parts = policy.family.trained_parts(policy.model)
        self._settings = settings
        self._rates = list(dict.fromkeys(self._peak(part) for part in self.parts))

    def groups(self, weights: Sequence[torch.Tensor], names: Sequence[str]) -> list[dict[str, Any]]:
        """As optimizers take them; ``names``: of the weights, in order."""
        rates = [self._peak(self._of_name(name)) for name in names]
        return [
            {"params": [w for w, of_weight in zip(weights, rates, strict=True) if of_weight == rate], "lr": rate}
            for rate in self._rates
        ]

    def set(self, groups: Sequence[dict[str, Any]], learning_rate: float) -> None:
        """Set an optimizer's groups to a step's ``learning_rate``, or the same share of their own peak."""
        for group, peak in zip(groups, self._rates, strict=True):
            group["lr"] = self._scaled(peak, learning_rate)

    def of_parts(self, learning_rate: float) -> dict[Part, float]:
        """Each trained part's rate in a step with this ``learning_rate``."""
        return {part: self._scaled(self._peak(part), learning_rate) for part in self.parts}

    def _peak(self, part: Part) -> float:
        return self._settings.learning_rates.get(part, self._settings.learning_rate)

    def _scaled(self, peak: float, learning_rate: float) -> float:
        return learning_rate * (peak / self._settings.learning_rate)


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

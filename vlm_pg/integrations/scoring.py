"""Scores groups with another trainer's model; its wrapping, adapters and frozen parts stay its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from vlm_pg.integrations.attention import GROUPED_OR_SDPA
from vlm_pg.models.lora import base_model, check_adapter
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import ResponseGroup


class GroupedScorer:
    """Takes part in ``model``'s forward: ``model(..., grouped_score=function)`` returns what the function returns.

    Going through the forward keeps everything that wraps the model (DistributedDataParallel, say) in the game; without
    that keyword the forward, and so generation, is what it was, on torch's sdpa attention.

    Args:
        model: the unwrapped transformers model, or a PeftModel around it.
        processor: its processor.
    """

    def __init__(self, model: Any, processor: Any):
        base = base_model(model)
        check_adapter(base)
        family, forward = family_of(base.config), base.forward
        base.set_attn_implementation({"text_config": GROUPED_OR_SDPA})
        with torch.enable_grad():  # the kernel is checked on gradients too, even if the first call wants none
            # The other trainer samples with the model's own forward: scoring counts positions as that does.
            settings = ModelSettings(path="in memory", positions="transformers")
            self.policy = Policy(base, processor, family, settings)

        @wraps(forward)
        def forward_or_score(*args: Any, grouped_score: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if grouped_score is None else grouped_score()

        base.forward = forward_or_score

    def __call__(
        self, model: Any, groups: Sequence[ResponseGroup], temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (differentiable) and entropies in nats (detached), fp32 [R] over all responses in order.

        ``model`` is the model as its trainer calls it, wrapped or not.
        """

        def score() -> tuple[torch.Tensor, torch.Tensor]:
            policy = self.policy
            # Asked every time: adapters come and go.
            tower = policy.family.vision_tower(policy.model)
            trains = any(p.requires_grad for p in tower.parameters())
            # A trained tower's outputs belong to one backward. An adapter on it that peft switches off counts as frozen
            # for a while, and what was kept before or after is another tower's output. A frozen tower's is kept.
            policy.vision.trains = trains or policy.vision.trains
            policy.weights_changed()
            policy.vision.trains = trains
            with_graph = trains and torch.is_grad_enabled()
            features = policy.vision.encode([group.prompt for group in groups], with_graph=with_graph)
            return policy(policy.pack(groups), policy.join_features(groups, features), temperature)

        return model(grouped_score=score)

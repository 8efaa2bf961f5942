"""Scores groups with another trainer's model; its wrapping, adapters and frozen parts stay its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch

from vlm_pg.integrations.attention_routing import route_attention
from vlm_pg.integrations.balancing import (
    balancing_loss,
    recorded_router_logits,
    repetitions,
    with_last_tokens_read,
    without_last_tokens,
)
from vlm_pg.models.family import Family
from vlm_pg.models.lora import base_model, check_adapter
from vlm_pg.models.packing import pack
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import ResponseGroup


class Scores(NamedTuple):
    """Of all responses in order: log-probabilities (differentiable) and entropies in nats, fp32 [R].

    ``balancing_loss``: a scalar, where it was asked for.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    balancing_loss: torch.Tensor | None = None


def check_model(model: Any) -> Family:
    """The family of a trainer's model; raises ModelError for one that cannot be scored exactly."""
    base = base_model(model)
    check_adapter(base)
    return family_of(base.config)


class GroupedScorer:
    """Takes part in ``model``'s forward: ``model(..., grouped_score=function)`` returns what the function returns.

    Going through the forward keeps everything that wraps the model (DistributedDataParallel, say) in the game; without
    that keyword the forward, and so generation, is what it was.

    Args:
        model: the unwrapped transformers model, or a PeftModel around it.
        processor: its processor or tokenizer.
        fp32_head: compute logits in fp32 from an output head in fp32, also under autocast.
    """

    def __init__(self, model: Any, processor: Any, fp32_head: bool = False):
        family, base = check_model(model), base_model(model)
        forward = base.forward
        route_attention(family.language_model(base))
        self.policy = _TrainersPolicy(base, processor, family, fp32_head)

        @wraps(forward)
        def forward_or_score(*args: Any, grouped_score: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if grouped_score is None else grouped_score()

        base.forward = forward_or_score

    def __call__(
        self,
        model: Any,
        groups: Sequence[ResponseGroup],
        temperature: float,
        entropy_graph: bool = False,
        counted: Sequence[bool] | None = None,
    ) -> Scores:
        """Score ``groups`` with ``model``: the model as its trainer calls it, wrapped or not.

        Args:
            entropy_graph: leave the entropies on the graph, for an entropy bonus.
            counted: compute the router's balancing loss too; per response whether its tokens count in it.
        """

        def score() -> Scores:
            policy = self.policy
            # Asked every time: adapters come and go.
            tower = policy.family.vision_tower(policy.model)
            trains = tower is not None and any(p.requires_grad for p in tower.parameters())
            # A trained tower's outputs belong to one backward. An adapter on it that peft switches off counts as frozen
            # for a while, and what was kept before or after is another tower's output. A frozen tower's is kept.
            policy.weights_changed(vision_trains=trains)
            with_graph = trains and torch.is_grad_enabled()
            features = policy.vision.encode([group.prompt for group in groups], with_graph=with_graph)
            joined = policy.join_features(groups, features)
            if counted is None:
                batch = policy.pack(groups)
                return Scores(*policy(Policy.stream_logprobs, batch, joined, temperature, entropy_graph))
            return self._with_balancing(groups, joined, temperature, entropy_graph, counted)

        return Scores(*model(grouped_score=score))

    def _with_balancing(
        self,
        groups: Sequence[ResponseGroup],
        features: torch.Tensor | None,
        temperature: float,
        entropy_graph: bool,
        counted: Sequence[bool],
    ) -> Scores:
        policy = self.policy
        for group in groups:
            policy.check_group(group)
        batch = pack(with_last_tokens_read(groups), policy.device)
        with recorded_router_logits(policy.family.routers(policy.language_model)) as logits:
            # Every token goes through every router.
            logprobs, entropies = policy(Policy.stream_logprobs, batch, features, temperature, entropy_graph, True)
        loss = balancing_loss(logits, repetitions(batch, counted), policy.model.config.get_text_config())
        return Scores(without_last_tokens(logprobs, batch), without_last_tokens(entropies, batch), loss)


class _TrainersPolicy(Policy):
    """A policy around a model that another trainer loaded, set up and samples from."""

    def __init__(self, model: Any, processor: Any, family: Family, fp32_head: bool):
        with_tokenizer = processor if hasattr(processor, "tokenizer") else None
        # The other trainer samples with the model's own forward: scoring counts positions as that does.
        settings = ModelSettings(path="in memory", positions="transformers")
        super().__init__(model, with_tokenizer, family, settings)
        self._fp32_head = fp32_head
        if fp32_head:  # of logits in fp32 a softmax has some bits more than a log-sum-exp
            self.fused_logits = False

    def _media_token_ids(self) -> tuple[int, ...]:
        # The trainer's own forward reads all others as words where no picture belongs to them, and so do we.
        token = self.family.image_token_id(self.model.config)
        return () if token is None else (token,)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._fp32_head:
            return super().logits(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return super().logits(hidden.float())

    def head_weight(self) -> torch.Tensor | None:
        return None if self._fp32_head else super().head_weight()

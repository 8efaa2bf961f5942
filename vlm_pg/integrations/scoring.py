"""Grouped scoring with another trainer's model; its wrapping, adapters and frozen parts stay its own.

Shape letters: T stream tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from vlm_pg.attention.plan import reading_plan
from vlm_pg.attention.registration import ATTENTION_NAME, ROUTED
from vlm_pg.models.family import Family
from vlm_pg.models.lora import base_model, check_adapter
from vlm_pg.models.packing import PackedBatch, pack
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import ResponseGroup


class Scores(NamedTuple):
    """Log-probabilities (differentiable) and entropies in nats of all responses in order, fp32 [R].

    ``balancing_loss``: the router's, a scalar, or None.
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
    """Wraps ``model``'s forward: ``model(..., grouped_score=function)`` returns what the function returns.

    So scoring passes through all wrappers of the model (DistributedDataParallel, say); without that keyword the
    forward, and so generation, is unchanged.

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
            # Read at every call: adapters come and go.
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

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        # The trainer's own forward reads all other media tokens as words where no picture belongs to them.
        token = self.family.image_token_id(self.model.config)
        return () if token is None else (token,)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._fp32_head:
            return super().logits(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return super().logits(hidden.float())

    def head_weight(self) -> torch.Tensor | None:
        return None if self._fp32_head else super().head_weight()


class _GroupedConfig:
    """A layer's configuration during a call with an ``attention_context``: only the attention it names differs."""

    _attn_implementation = ATTENTION_NAME

    def __init__(self, own: Any):
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def route_attention(language_model: Any) -> None:
    """Calls that carry an ``attention_context`` get grouped attention; the model's configuration does not change.

    transformers looks the attention up in the layer's configuration at every call. The choice has to travel with the
    call: a layer that gradient checkpointing runs again in backward, long after the scoring is over, must choose the
    same, and readers of the configuration in between (generation, continuous batching) must find their own value.
    """
    if getattr(language_model, ROUTED, False):
        return
    for layer in language_model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.register_forward_pre_hook(_choose, with_kwargs=True)
            layer.self_attn.register_forward_hook(_restore, always_call=True)
    setattr(language_model, ROUTED, True)


def _choose(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _restore(attention)  # an interrupted call may have left it
    if kwargs.get("attention_context") is not None:
        attention.config = _GroupedConfig(attention.config)


def _restore(attention: Any, *_: Any) -> None:
    if isinstance(attention.config, _GroupedConfig):
        attention.config = attention.config.own


def with_last_tokens_read(groups: Sequence[ResponseGroup]) -> list[ResponseGroup]:
    """One more token behind each response, never scored, so that the last real one is in the stream."""
    return [
        ResponseGroup(group.prompt, tuple(torch.cat([response, response[-1:]]) for response in group.responses))
        for group in groups
    ]


def without_last_tokens(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Values of the real tokens of a batch made ``with_last_tokens_read``."""
    lengths = torch.tensor([length for lengths in batch.response_lengths for length in lengths])
    real = torch.ones(int(lengths.sum()), dtype=torch.bool)
    real[lengths.cumsum(0) - 1] = False
    return values[real.to(values.device)]


def repetitions(batch: PackedBatch, counted: Sequence[bool]) -> torch.Tensor:
    """fp32 [T]: how often each stream token would be in the repeated batch.

    The router's balancing loss (https://huggingface.co/papers/2101.03961, equations 4 to 6) counts tokens. So a shared
    token counts as often as it would have been repeated, and the last token of a response, which nothing else needs to
    read, is read.

    Args:
        batch: made ``with_last_tokens_read``.
        counted: per response in order, whether its own tokens count; its prompt's always do.
    """
    tree = batch.tree
    lengths = [length for lengths in batch.response_lengths for length in lengths]
    # The second token of a response is predicted by its first, with which its node begins.
    second = torch.tensor([0, *lengths[:-1]]).cumsum(0) + 1
    read_rows = reading_plan(tree, batch.reads).rows
    predicting = batch.predict_rows.cpu()[second]
    first_rows = predicting.tolist() if read_rows is None else [read_rows[index] for index in predicting.tolist()]
    node_at = {start: node for node, start in enumerate(tree.starts)}
    times = [0.0] * len(tree.lengths)
    for row, counts in zip(first_rows, counted, strict=True):
        node = node_at[row]
        times[node] = float(counts)
        while (node := tree.parents[node]) >= 0:
            times[node] += 1.0
    return torch.repeat_interleave(torch.tensor(times), torch.tensor(tree.lengths))


@contextmanager
def recorded_router_logits(routers: Sequence[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """A list that collects each layer's router logits [T, E], on the graph, while the model runs inside."""
    logits: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        logits.append(output[0])

    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balancing_loss(logits: Sequence[torch.Tensor], times: torch.Tensor, text_config: Any) -> torch.Tensor:
    """transformers' own loss of tokens that count ``times`` [T] each."""
    experts, chosen = text_config.num_experts, text_config.num_experts_per_tok
    of_layers: Any = tuple(logits)
    loss = load_balancing_loss_func(of_layers, experts, chosen, times[None].to(logits[0].device))
    assert isinstance(loss, torch.Tensor)
    return loss

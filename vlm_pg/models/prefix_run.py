"""Groups beyond memory: the prefixes run once, responses follow in chunks, one backward goes through the prefixes.

What the responses need of the prefixes (keys and values of each layer, states of linear layers, last hidden states) is
cut from the prefixes' graph. Every chunk's backward leaves its gradient there, in fp32; a last backward carries the sum
through the prefixes. Exact: d loss / d weights = (d loss / d states)(d states / d weights) plus the chunks' own part.
Memory is one prefix and one chunk, whatever the number of responses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vlm_pg.attention.plan import reading_plan
from vlm_pg.models.contexts import ChunkContext, PrefixContext
from vlm_pg.models.network import Network
from vlm_pg.models.packing import ChunkBatch, PrefixBatch
from vlm_pg.models.stream_rows import read_hidden, target_logprobs


@dataclass
class PrefixStates:
    """What responses need of prefixes that have run.

    ``last_hidden`` [prompt ends, D]: final hidden states of the rows the prefix batch reads.
    ``layers``: per decoder layer keys and values [prefix rows, K, H], or the linear layer's states per node.

    A sequence rank has the hidden states of its own rows, and its own heads of all keys, values and states.

    All are outputs of the prefixes' graph; chunks see them through ``for_chunk``, which ends their gradients here.
    """

    last_hidden: torch.Tensor
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    _gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def for_chunk(self) -> tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """The states as a chunk may use them: same values, gradients summed up here in fp32."""
        return self._cut(self.last_hidden), {
            layer: (self._cut(first), self._cut(second)) for layer, (first, second) in self.layers.items()
        }

    def _cut(self, state: torch.Tensor) -> torch.Tensor:
        if not state.requires_grad or not torch.is_grad_enabled():
            return state.detach()
        anchor = torch.zeros((), device=state.device, requires_grad=True)
        return _CollectGradient.apply(anchor, state.detach(), self._gradients, id(state))

    def surrogate_loss(self, loss_scale: float = 1.0) -> torch.Tensor:
        """A scalar, zero in value, whose backward runs through the prefixes with what the chunks left here.

        Args:
            loss_scale: what the caller's ``backward`` multiplies losses by; the chunks' gradients were scaled already.
        """
        states = [self.last_hidden, *(state for pair in self.layers.values() for state in pair)]
        touched = [state for state in states if id(state) in self._gradients]
        # The last layer's hidden states are always part of it, so that backward reaches every weight of the prefixes.
        nothing = self.last_hidden.sum() * 0.0
        if not touched:
            return nothing
        gradients = [self._gradients.pop(id(state)) for state in touched]
        return nothing + _InjectGradient.apply(gradients, loss_scale, *touched)


def run_prefixes(network: Network, batch: PrefixBatch, features: torch.Tensor | None) -> PrefixStates:
    """The prefixes of some groups through the model once."""
    context = PrefixContext(
        batch.tree, network.kernel_here, reading_plan(batch.tree, batch.reads), network.checkpointing, batch.share
    )
    return PrefixStates(read_hidden(network, batch, context, features), context.take())


def run_chunk(
    network: Network, batch: ChunkBatch, states: PrefixStates, temperature: float = 1.0, entropy_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities fp32 [R] of the chunk's response tokens and entropies, as ``Policy.forward`` gives them."""
    last_hidden, layers = states.for_chunk()
    hidden = last_hidden
    if batch.input_ids.shape[0]:
        context = ChunkContext(
            batch.tree,
            reading_plan(batch.tree, batch.reads),
            batch.node_of_prefix,
            layers,
            network.kernel_here,
            network.checkpointing,
            batch.share,
        )
        hidden = torch.cat([last_hidden, read_hidden(network, batch, context)])
    return target_logprobs(network, batch, hidden, temperature, entropy_graph)


def run_back(network: Network, states: PrefixStates, loss_scale: float, every_weight: bool) -> torch.Tensor:
    """``states.surrogate_loss``; with ``every_weight`` its backward also reaches an untied output head, with zeros."""
    loss = states.surrogate_loss(loss_scale)
    head = network.model.lm_head
    tied = getattr(head, "weight", None) is network.model.get_input_embeddings().weight
    if every_weight and not tied and any(parameter.requires_grad for parameter in head.parameters()):
        loss = loss + network.logits(states.last_hidden.detach()[:1]).float().sum() * 0.0
    return loss


class _CollectGradient(torch.autograd.Function):
    """Identity whose backward adds to a sum in fp32 and goes no further."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, state: torch.Tensor, sums: dict[int, torch.Tensor], key: int
    ) -> torch.Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, ...]:
        gradient = grad_outputs[0]
        if ctx.key in ctx.sums:
            ctx.sums[ctx.key] += gradient
        else:
            ctx.sums[ctx.key] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return None, None, None, None


class _InjectGradient(torch.autograd.Function):
    """Zero whose gradients are given: sum(state * gradient) without its products."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], loss_scale: float, *states: torch.Tensor) -> torch.Tensor:
        ctx.gradients, ctx.loss_scale, ctx.dtypes = gradients, loss_scale, [state.dtype for state in states]
        return torch.zeros((), device=states[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        # Whoever still holds the loss must not hold these: in fp32 they are as large as the prefixes' keys and values.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("The gradients left in PrefixStates were used already; run the prefixes again.")
        factor = grad_outputs[0] / ctx.loss_scale
        results = []
        for place, dtype in enumerate(ctx.dtypes):
            results.append(gradients[place].mul_(factor).to(dtype))
            gradients[place] = None
        return None, None, *results

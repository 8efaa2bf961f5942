"""Groups beyond memory: the prefixes run once, responses follow in chunks, one backward goes through the prefixes.

What the responses need of the prefixes (keys and values of each layer, states of linear layers, last hidden states) is
cut from the prefixes' graph. Every chunk's backward leaves its gradient there, in fp32; a last backward carries the sum
through the prefixes. Exact: d loss / d weights = (d loss / d states)(d states / d weights) plus the chunks' own part.
Memory is one prefix and one chunk, whatever the number of responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.attention.plan import reading_plan
from vlm_pg.models.contexts import ChunkContext, PrefixContext
from vlm_pg.models.network import Network
from vlm_pg.models.packing import ChunkBatch, PrefixBatch
from vlm_pg.models.state_store import LAST_HIDDEN, GradientSums, Key, StateStore, cut
from vlm_pg.models.stream_rows import read_hidden, target_logprobs


@dataclass
class PrefixStates:
    """What responses need of prefixes that have run.

    ``last_hidden`` [prompt ends, D]: final hidden states of the rows the prefix batch reads, on the prefixes' graph.
    ``layers``: per decoder layer keys and values [prefix rows, K, H], or the linear layer's states per node.

    A sequence rank has the hidden states of its own rows, and its own heads of all keys, values and states.

    Chunks see both with their gradients ended; the sums of these stay here.
    """

    last_hidden: torch.Tensor
    layers: StateStore

    def last_hidden_for_chunk(self) -> torch.Tensor:
        """Same values, gradients summed up here in fp32."""
        return cut(self.last_hidden, self.last_hidden.requires_grad, self.layers.sums, LAST_HIDDEN)

    def surrogate_loss(self, loss_scale: float = 1.0) -> torch.Tensor:
        """A scalar, zero in value, whose backward runs through the prefixes with what the chunks left here.

        Args:
            loss_scale: what the caller's ``backward`` multiplies losses by; the chunks' gradients were scaled already.
        """
        sums = self.layers.sums
        # The last layer's hidden states are always part of it, so that backward reaches every weight of the prefixes,
        # and with them every place where states that lie elsewhere take their sums.
        states = {LAST_HIDDEN: self.last_hidden} | {
            key: state for key, state in self.layers.held.items() if key in sums
        }
        return _InjectGradient.apply(sums, tuple(states), loss_scale, *states.values())


def run_prefixes(network: Network, batch: PrefixBatch, features: torch.Tensor | None) -> PrefixStates:
    """The prefixes of some groups through the model once."""
    states = StateStore(network.stream_memory.place_of_states if network.checkpointing else None)
    context = PrefixContext(
        states,
        batch.tree,
        network.kernel_here,
        reading_plan(batch.tree, batch.reads),
        network.checkpointing,
        batch.share,
    )
    hidden = read_hidden(network, batch, context, features)
    context.close()
    return PrefixStates(hidden, states)


def run_chunk(
    network: Network, batch: ChunkBatch, states: PrefixStates, temperature: float = 1.0, entropy_graph: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities fp32 [R] of the chunk's response tokens and entropies, as ``Policy.forward`` gives them."""
    hidden = last_hidden = states.last_hidden_for_chunk()
    if batch.input_ids.shape[0]:
        context = ChunkContext(
            batch.tree,
            reading_plan(batch.tree, batch.reads),
            batch.node_of_prefix,
            states.layers,
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


class _InjectGradient(torch.autograd.Function):
    """Zero whose gradients are given: sum(state * gradient) without its products."""

    @staticmethod
    def forward(
        ctx: Any, sums: GradientSums, keys: tuple[Key, ...], loss_scale: float, *states: torch.Tensor
    ) -> torch.Tensor:
        ctx.sums, ctx.keys, ctx.loss_scale = sums, keys, loss_scale
        ctx.shapes = [(state.shape, state.dtype) for state in states]
        return torch.zeros((), device=states[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        # Whoever still holds the loss must not hold these: in fp32 they are as large as the prefixes' keys and values.
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("The gradients left in PrefixStates were used already; run the prefixes again.")
        sums.factor = grad_outputs[0] / ctx.loss_scale
        results = []
        for key, (shape, dtype) in zip(ctx.keys, ctx.shapes, strict=True):
            left = sums.pop(key)
            if left is None:
                left = torch.zeros(shape, dtype=dtype, device=grad_outputs[0].device)
            results.append(left.mul_(sums.factor).to(dtype))
        return None, None, None, *results

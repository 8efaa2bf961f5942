"""States of prefixes that have run: keys and values of each layer, states of linear layers, last hidden states.

Chunks of responses see them cut from the prefixes' graph: each chunk's backward adds its gradient to a sum in fp32, and
a last backward carries the sums through the prefixes. Keys and values, and their sums, may be offloaded between layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_pg.models.offloading import Offloaded, OffloadTarget

KeysValues = tuple[Tensor, Tensor]
# Layer, and which of its two states; -1 for the prompts' last hidden states.
Key = tuple[int, int]
LAST_HIDDEN: Key = (-1, 0)


class GradientSums:
    """By state, in fp32, the sum of its gradients over chunks.

    Args:
        target: where the sums of ``offloaded`` lie between two additions.
    """

    def __init__(self, target: OffloadTarget | None = None):
        self._target = target
        self._here: dict[Key, Tensor] = {}
        self._away: dict[Key, Offloaded] = {}
        self.offloaded: set[Key] = set()
        # A sum is multiplied by this when it is taken.
        self.factor: Tensor | float = 1.0

    def add(self, key: Key, gradient: Tensor) -> None:
        before = self.pop(key)
        if before is None:
            before = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            before += gradient
        if self._target is not None and key in self.offloaded:
            self._away[key] = self._target.put(before)
        else:
            self._here[key] = before

    def pop(self, key: Key) -> Tensor | None:
        """The sum, not yet multiplied by ``factor``; None if no chunk added to it."""
        if key in self._away:
            return self._away.pop(key).get()
        return self._here.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._here or key in self._away


class StateStore:
    """The states of every layer of the prefixes.

    Args:
        target: where keys and values are offloaded; None: they stay on the device.
    """

    def __init__(self, target: OffloadTarget | None = None):
        self._target = target
        self.sums = GradientSums(target)
        # On the prefixes' graph.
        self.held: dict[Key, Tensor] = {}
        self._away: dict[Key, tuple[Offloaded, bool]] = {}
        self._last_read = -1

    def hold(self, layer: int, first: Tensor, second: Tensor) -> None:
        """Store states that are not offloaded."""
        self.held |= {(layer, 0): first, (layer, 1): second}

    def put(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store keys and values [prefix rows, K, H]; returns those that the prefixes' own attention must use."""
        if self._target is None:
            self.hold(layer, k, v)
            return k, v
        return self._offload(self._target, (layer, 0), k), self._offload(self._target, (layer, 1), v)

    def _offload(self, target: OffloadTarget, key: Key, state: Tensor) -> Tensor:
        with_graph = state.requires_grad and torch.is_grad_enabled()
        self._away[key] = (target.put(state), with_graph)
        if not with_graph:
            return state
        # Backward passes here anyway, one layer at a time; no tensor of the graph needs to be held until then.
        self.sums.offloaded.add(key)
        return _AddSum.apply(state, self.sums, key)

    def __getitem__(self, layer: int) -> KeysValues:
        """The layer's states for a chunk: same values, gradients summed up here."""
        following = layer + 1 if layer > self._last_read else layer - 1
        self._last_read = layer
        pair = self._cut((layer, 0)), self._cut((layer, 1))
        for stored, _ in (self._away[key] for key in ((following, 0), (following, 1)) if key in self._away):
            stored.fetch()
        return pair

    def _cut(self, key: Key) -> Tensor:
        if key in self.held:
            state = self.held[key]
            return cut(state, state.requires_grad, self.sums, key)
        stored, with_graph = self._away[key]
        return cut(stored.get(), with_graph, self.sums, key)


@dataclass
class PrefixStates:
    """What responses need of prefixes that have run; chunks see it with gradients cut, whose sums stay here.

    ``last_hidden`` [prompt ends, D]: final hidden states of the rows the prefix batch reads, on the prefixes' graph.
    ``layers``: per decoder layer keys and values [prefix rows, K, H], or the linear layer's states per node.

    A sequence rank has the hidden states of its own rows, and its own heads of all keys, values and states.
    """

    last_hidden: Tensor
    layers: StateStore

    def last_hidden_for_chunk(self) -> Tensor:
        """Same values, gradients summed up here in fp32."""
        return cut(self.last_hidden, self.last_hidden.requires_grad, self.layers.sums, LAST_HIDDEN)

    def surrogate_loss(self, loss_scale: float = 1.0) -> Tensor:
        """A scalar, zero in value, whose backward runs through the prefixes with the chunks' gradient sums.

        Args:
            loss_scale: factor of losses in the caller's ``backward``; the chunks' gradients were scaled already.
        """
        sums = self.layers.sums
        # The last layer's hidden states are always part of it, so that backward reaches every weight of the prefixes,
        # and with them every node where offloaded states add their sums.
        states = {LAST_HIDDEN: self.last_hidden} | {
            key: state for key, state in self.layers.held.items() if key in sums
        }
        return _InjectGradient.apply(sums, tuple(states), loss_scale, *states.values())


def cut(state: Tensor, with_graph: bool, sums: GradientSums, key: Key) -> Tensor:
    """The same values; their gradient is added to ``sums`` and goes no further."""
    if not with_graph or not torch.is_grad_enabled():
        return state.detach()
    anchor = torch.zeros((), device=state.device, requires_grad=True)
    return _CollectGradient.apply(anchor, state.detach(), sums, key)


class _CollectGradient(torch.autograd.Function):
    """Identity whose backward adds to a sum and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, state: Tensor, sums: GradientSums, key: Key) -> Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        ctx.sums.add(ctx.key, grad_outputs[0])
        return None, None, None, None


class _AddSum(torch.autograd.Function):
    """Identity whose backward adds the chunks' sum."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, sums: GradientSums, key: Key) -> Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient = grad_outputs[0]
        left = ctx.sums.pop(ctx.key)
        if left is not None:
            gradient = left.mul_(ctx.sums.factor).add_(gradient).to(gradient.dtype)
        return gradient, None, None


class _InjectGradient(torch.autograd.Function):
    """Zero with given gradients: sum(state * gradient) without its products."""

    @staticmethod
    def forward(ctx: Any, sums: GradientSums, keys: tuple[Key, ...], loss_scale: float, *states: Tensor) -> Tensor:
        ctx.sums, ctx.keys, ctx.loss_scale = sums, keys, loss_scale
        ctx.shapes = [(state.shape, state.dtype) for state in states]
        return torch.zeros((), device=states[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        # A reference to the loss must not keep the sums alive: in fp32, as large as the prefixes' keys and values.
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("The gradients in PrefixStates were used already; run the prefixes again.")
        sums.factor = grad_outputs[0] / ctx.loss_scale
        results = []
        for key, (shape, dtype) in zip(ctx.keys, ctx.shapes, strict=True):
            left = sums.pop(key)
            if left is None:
                left = torch.zeros(shape, dtype=dtype, device=grad_outputs[0].device)
            results.append(left.mul_(sums.factor).to(dtype))
        return None, None, None, *results

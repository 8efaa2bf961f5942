"""States of prefixes that have run (keys and values of each layer, states of linear layers), and their gradients.

Chunks of responses see the states with their gradients ended: each leaves its own in a sum in fp32, and the prefixes'
backward takes the sum along. Keys and values, and their sums, may lie elsewhere whenever no layer is at work on them.
"""

from __future__ import annotations

from typing import Any

import torch

from vlm_pg.models.places import Place, Stored

KeysValues = tuple[torch.Tensor, torch.Tensor]
# Layer, and which of its two states; -1 for the prompts' last hidden states.
Key = tuple[int, int]
LAST_HIDDEN: Key = (-1, 0)


class GradientSums:
    """By state, in fp32, what chunks left of its gradient.

    Args:
        place: where the sums of ``elsewhere`` lie between two additions.
    """

    def __init__(self, place: Place | None = None):
        self._place = place
        self._here: dict[Key, torch.Tensor] = {}
        self._away: dict[Key, Stored] = {}
        self.elsewhere: set[Key] = set()
        # What a sum is multiplied by when it is taken.
        self.factor: torch.Tensor | float = 1.0

    def add(self, key: Key, gradient: torch.Tensor) -> None:
        before = self._here.pop(key, None) if key in self._here else self._back(key)
        if before is None:
            before = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            before += gradient
        if self._place is not None and key in self.elsewhere:
            self._away[key] = self._place.put(before)
        else:
            self._here[key] = before

    def pop(self, key: Key) -> torch.Tensor | None:
        """The sum, for whoever multiplies it by ``factor``; None if nothing was left."""
        return self._here.pop(key) if key in self._here else self._back(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._here or key in self._away

    def _back(self, key: Key) -> torch.Tensor | None:
        stored = self._away.pop(key, None)
        return None if stored is None else stored.get()


class StateStore:
    """What responses need of every layer of the prefixes.

    Args:
        place: where keys and values go; None: they stay.
    """

    def __init__(self, place: Place | None = None):
        self._place = place
        self.sums = GradientSums(place)
        # On the prefixes' graph.
        self.held: dict[Key, torch.Tensor] = {}
        self._away: dict[Key, tuple[Stored, bool]] = {}
        self._asked = -1

    def hold(self, layer: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """States that stay where they are."""
        self.held |= {(layer, 0): first, (layer, 1): second}

    def keep(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> KeysValues:
        """Keys and values [prefix rows, K, H]; those that the prefixes' own attention is to use in their place."""
        if self._place is None:
            self.hold(layer, k, v)
            return k, v
        return self._put_away((layer, 0), k), self._put_away((layer, 1), v)

    def _put_away(self, key: Key, state: torch.Tensor) -> torch.Tensor:
        assert self._place is not None
        with_graph = state.requires_grad and torch.is_grad_enabled()
        self._away[key] = (self._place.put(state), with_graph)
        if not with_graph:
            return state
        # Backward comes by here anyway, one layer at a time; no tensor of the graph needs to be held until then.
        self.sums.elsewhere.add(key)
        return _AddSum.apply(state, self.sums, key)

    def __getitem__(self, layer: int) -> KeysValues:
        """The layer's states as a chunk may use them: same values, gradients summed up here."""
        following = layer + 1 if layer > self._asked else layer - 1
        self._asked = layer
        pair = self._cut((layer, 0)), self._cut((layer, 1))
        for stored, _ in (self._away[key] for key in ((following, 0), (following, 1)) if key in self._away):
            stored.fetch()
        return pair

    def _cut(self, key: Key) -> torch.Tensor:
        if key in self.held:
            state = self.held[key]
            return cut(state, state.requires_grad, self.sums, key)
        stored, with_graph = self._away[key]
        return cut(stored.get(), with_graph, self.sums, key)


def cut(state: torch.Tensor, with_graph: bool, sums: GradientSums, key: Key) -> torch.Tensor:
    """The same values; their gradient is added to ``sums`` and goes no further."""
    if not with_graph or not torch.is_grad_enabled():
        return state.detach()
    anchor = torch.zeros((), device=state.device, requires_grad=True)
    return _CollectGradient.apply(anchor, state.detach(), sums, key)


class _CollectGradient(torch.autograd.Function):
    """Identity whose backward adds to a sum and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, state: torch.Tensor, sums: GradientSums, key: Key) -> torch.Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, ...]:
        ctx.sums.add(ctx.key, grad_outputs[0])
        return None, None, None, None


class _AddSum(torch.autograd.Function):
    """Identity whose backward adds what chunks left."""

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, sums: GradientSums, key: Key) -> torch.Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grad_outputs[0]
        left = ctx.sums.pop(ctx.key)
        if left is not None:
            gradient = left.mul_(ctx.sums.factor).add_(gradient).to(gradient.dtype)
        return gradient, None, None

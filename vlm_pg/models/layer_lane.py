"""What the layers of one pass have put away, and who is likely to be asked for next.

Backward goes through the layers in reverse, so when something of a layer is asked for, what else that layer and the one
before it put away is on its way already.
"""

from __future__ import annotations

from weakref import WeakSet

import torch

from vlm_pg.models.places import Place, Stored


class Lane:
    """One pass's tensors in ``place``, layer by layer; those below ``least_bytes`` stay where they are."""

    def __init__(self, place: Place, least_bytes: int):
        self._place = place
        self._least_bytes = least_bytes
        self._waiting: list[WeakSet[Kept]] = [WeakSet()]

    def next_layer(self) -> None:
        """What is put away from now on belongs to the layer that begins."""
        self._waiting.append(WeakSet())

    def put(self, tensor: torch.Tensor) -> Kept:
        """``tensor`` without its graph, put away if it is large enough."""
        if tensor.numel() * tensor.element_size() < self._least_bytes:
            return Kept(tensor.detach(), None)
        kept = Kept(None, self._place.put(tensor), self, len(self._waiting) - 1)
        self._waiting[-1].add(kept)
        return kept

    def expect(self, layer: int) -> None:
        """Bring back what this layer and the one before it put away, unless it has been asked for already."""
        for kept in [kept for near in self._waiting[max(0, layer - 1) : layer + 1] for kept in near]:
            kept.fetch()

    def was_taken(self, kept: Kept, layer: int) -> None:
        self._waiting[layer].discard(kept)


class Kept:
    """One tensor of a lane, where it was put."""

    def __init__(self, here: torch.Tensor | None, stored: Stored | None, lane: Lane | None = None, layer: int = 0):
        self._here, self._stored, self._lane, self._layer = here, stored, lane, layer

    def fetch(self) -> None:
        if self._stored is not None:
            self._stored.fetch()

    def get(self) -> torch.Tensor:
        """Its values, on the device they came from."""
        if self._stored is None or self._lane is None:
            assert self._here is not None
            return self._here
        self._lane.was_taken(self, self._layer)
        self._lane.expect(self._layer)
        return self._stored.get()

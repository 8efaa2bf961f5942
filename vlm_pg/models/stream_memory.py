"""Memory of one network's long streams: layer inputs offloaded, row-wise modules in tiles, the tower in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from vlm_pg.models.offloading import LaneTensor, OffloadLane, OffloadTarget, offload_target
from vlm_pg.models.row_tiles import RowTiles, route_row_wise
from vlm_pg.models.settings import ModelSettings

# Smaller tensors cost more to move than to hold.
LEAST_BYTES = 2**16


@dataclass(frozen=True)
class MemoryChoice:
    """Measures that save memory.

    Attributes:
        offload_layer_inputs: inputs of checkpointed decoder layers, and attention's outputs for their recomputation.
        offload_prefix_states: keys and values of prefixes that run once, and the fp32 sums of their gradients.
        mlp_tile_rows: rows of a tile of MLPs and norms; 0: whole.
        vision_piece_tokens: visual tokens of one call of the tower; 0: all at once.
    """

    offload_layer_inputs: bool = False
    offload_prefix_states: bool = False
    mlp_tile_rows: int = 0
    vision_piece_tokens: int = 0

    @classmethod
    def of(cls, settings: ModelSettings) -> MemoryChoice:
        """The settings; ``auto``, which a run resolves by its sizes, is off."""
        values = {name: getattr(settings, name) for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in values.items() if value != "auto"})

    @property
    def offloads(self) -> bool:
        return self.offload_layer_inputs or self.offload_prefix_states


class StreamMemory:
    """Carries out a choice on one language model.

    Args:
        folder: where the file is made if the device is the CPU.
    """

    def __init__(self, language_model: Any, choice: MemoryChoice, device: torch.device, folder: str | None = None):
        self.choice = choice
        self.place: OffloadTarget | None = offload_target(device, folder) if choice.offloads else None
        self.tiles = RowTiles(choice.mlp_tile_rows) if choice.mlp_tile_rows else None
        self.least_bytes = LEAST_BYTES
        self._lane: OffloadLane | None = None
        route_row_wise(language_model, self.tiles)
        for layer in language_model.layers:
            if getattr(layer, "gradient_checkpointing", False) and (choice.offload_layer_inputs or self.tiles):
                layer._gradient_checkpointing_func = self.checkpointed

    @property
    def place_of_states(self) -> OffloadTarget | None:
        """Where keys and values of prefixes go; None: they stay."""
        return self.place if self.choice.offload_prefix_states else None

    @contextmanager
    def in_pass(self, tiles: int | None) -> Iterator[OffloadLane | None]:
        """The layers of one pass, forward.

        Args:
            tiles: how many the ranks have agreed on; None: as many as this rank's rows need.

        Yields:
            Where this pass's layers offload tensors that backward needs; None: they stay.
        """
        before = self._lane
        away = self.place if self.choice.offload_layer_inputs and torch.is_grad_enabled() else None
        self._lane = None if away is None else OffloadLane(away, self.least_bytes)
        try:
            with self.tiles.agreed_on(tiles) if self.tiles is not None else nullcontext():
                yield self._lane
        finally:
            self._lane = before

    def checkpointed(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """As ``torch.utils.checkpoint.checkpoint``: inputs go where the pass puts them, and the recomputation makes as
        many tiles as the first run."""
        lane, tiles = self._lane, self.tiles
        context: dict[str, Any] = {}
        if tiles is not None:
            agreed = tiles.agreed
            context["context_fn"] = lambda: (nullcontext(), tiles.agreed_on(agreed))
        if lane is None:
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, **context)
        lane.next_layer()
        with saved_tensors_hooks(lane.put, LaneTensor.get):
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, **context)

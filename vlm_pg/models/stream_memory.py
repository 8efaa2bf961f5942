"""Memory of one network's long streams: layer inputs offloaded, row-wise modules in tiles, the tower in pieces.

MLPs and norms treat every row by itself, so a stream may be cut anywhere, and only one tile's intermediates are alive.
Each tile is a checkpoint of its own: of its intermediates, several times as wide as a hidden state, nothing is stored,
and backward computes them again, tile by tile. The graph stays one graph: the gradients of a weight add up in autograd
before hooks on them (DeepSpeed's) see the sum, once. A checkpointed layer computes its MLP once more than without
tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from vlm_pg.errors import ModelError
from vlm_pg.models.offloading import LaneTensor, OffloadLane, OffloadTarget, offload_target
from vlm_pg.models.settings import ModelSettings

# Smaller tensors cost more to move than to hold.
LEAST_BYTES = 2**16
# Modules of a decoder layer that treat every row by itself.
_ROW_WISE = ("input_layernorm", "post_attention_layernorm", "mlp")


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


class StreamMemory:
    """Carries out a choice on one language model. ``folder``: where the file is made if the device is the CPU."""

    def __init__(self, language_model: Any, choice: MemoryChoice, device: torch.device, folder: str | None = None):
        self.choice = choice
        offloads = choice.offload_layer_inputs or choice.offload_prefix_states
        self.target: OffloadTarget | None = offload_target(device, folder) if offloads else None
        self.tiles = RowTiles(choice.mlp_tile_rows) if choice.mlp_tile_rows else None
        self.least_bytes = LEAST_BYTES
        self._lane: OffloadLane | None = None
        route_row_wise(language_model, self.tiles)
        for layer in language_model.layers:
            if getattr(layer, "gradient_checkpointing", False) and (choice.offload_layer_inputs or self.tiles):
                layer._gradient_checkpointing_func = self.checkpointed

    @property
    def prefix_target(self) -> OffloadTarget | None:
        """Where keys and values of prefixes are offloaded; None: they stay on the device."""
        return self.target if self.choice.offload_prefix_states else None

    @contextmanager
    def in_pass(self, tiles: int | None) -> Iterator[OffloadLane | None]:
        """The layers of one pass, forward.

        Args:
            tiles: how many the ranks have agreed on; None: as many as this rank's rows need.

        Yields:
            Offloads tensors of this pass's layers that backward needs; None: they stay on the device.
        """
        before = self._lane
        target = self.target if self.choice.offload_layer_inputs and torch.is_grad_enabled() else None
        self._lane = None if target is None else OffloadLane(target, self.least_bytes)
        try:
            with self.tiles.agreed_on(tiles) if self.tiles is not None else nullcontext():
                yield self._lane
        finally:
            self._lane = before

    def checkpointed(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """As ``torch.utils.checkpoint.checkpoint``, with inputs in the pass's lane, and as many tiles in the
        recomputation as in the first run."""
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


class RowTiles:
    """How many tiles the modules of one language model make of a stream.

    ``rows``: of a tile, at most. ``start``: first row of the tile that runs.
    """

    def __init__(self, rows: int):
        if rows < 1:
            raise ValueError(f"rows is {rows}; a tile has at least 1.")
        self.rows = rows
        self.start = 0
        self.agreed: int | None = None

    def needed(self, rows: int) -> int:
        """Tiles of a stream of so many rows."""
        return max(1, -(-rows // self.rows))

    @contextmanager
    def agreed_on(self, count: int | None) -> Iterator[None]:
        """Inside, all modules make ``count`` tiles: with sharded weights every call of a module is a collective, and
        ranks have streams of different lengths. None: as many as the rows need."""
        before, self.agreed = self.agreed, count
        try:
            yield
        finally:
            self.agreed = before

    def run(self, module: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """``module(hidden)``, tile by tile; hidden [..., rows, D]."""
        count = self.needed(hidden.shape[-2]) if self.agreed is None else self.agreed
        if count == 1:
            self.start = 0
            return module(hidden)
        outputs, start = [], 0
        for tile in hidden.tensor_split(count, dim=-2):
            first = start if tile.shape[-2] else 0  # an empty one runs on the first row
            outputs.append(_one_tile(partial(self._run_from, module, first), tile, hidden))
            start += tile.shape[-2]
        return torch.cat(outputs, dim=-2)

    def _run_from(self, module: Callable[[Tensor], Tensor], start: int, tile: Tensor) -> Tensor:
        self.start = start
        return module(tile)


def _one_tile(module: Callable[[Tensor], Tensor], tile: Tensor, hidden: Tensor) -> Tensor:
    """An empty tile runs on a dummy row with zero gradient, so that its collectives are made."""
    given = tile if tile.shape[-2] else hidden[..., :1, :]
    if torch.is_grad_enabled():
        out: Any = checkpoint(module, given, use_reentrant=False, preserve_rng_state=False)
    else:
        out = module(given)
    if not isinstance(out, Tensor):
        raise ModelError(
            f"An MLP or norm of the model returned {type(out).__name__}; in tiles of rows it must be a tensor. Set "
            "model.mlp_tile_rows=0."
        )
    return out[..., : tile.shape[-2], :]


def route_row_wise(language_model: Any, tiles: RowTiles | None) -> None:
    """Let the row-wise modules of all decoder layers run in ``tiles``; None: whole, as they were."""
    for layer in language_model.layers:
        for name in _ROW_WISE:
            module = getattr(layer, name, None)
            # A module that was never tiled stays untouched.
            if module is None or (tiles is None and not hasattr(module, "vlm_pg_whole_forward")):
                continue
            # The instance's forward, which liger-kernel may have replaced. A bound method: copy.deepcopy binds it to
            # the copy, where a closure would keep the original's weights.
            if not hasattr(module, "vlm_pg_whole_forward"):
                module.vlm_pg_whole_forward = module.forward
                module.forward = MethodType(_forward, module)
            module.vlm_pg_tiles = tiles


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Calls with further arguments are not tiled.
    if self.vlm_pg_tiles is None or args or kwargs:
        return self.vlm_pg_whole_forward(hidden_states, *args, **kwargs)
    return self.vlm_pg_tiles.run(self.vlm_pg_whole_forward, hidden_states)

"""MLPs and norms of decoder layers in tiles of rows: only one tile's intermediates are alive.

Both treat every row by itself, so a stream may be cut anywhere. Each tile is a checkpoint of its own: of its
intermediates, several times as wide as a hidden state, nothing is kept, and backward computes them again, tile by tile.
The graph stays one graph: the gradients of a weight add up in autograd before hooks on them (DeepSpeed's) see the sum,
once. A checkpointed layer computes its MLP once more than without tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from vlm_pg.errors import ModelError

# Modules of a decoder layer that treat every row by itself.
_ROW_WISE = ("input_layernorm", "post_attention_layernorm", "mlp")


class RowTiles:
    """How many tiles the modules of one language model make of a stream.

    Args:
        rows: of a tile, at most.
    """

    def __init__(self, rows: int):
        if rows < 1:
            raise ValueError(f"rows is {rows}; a tile has at least 1.")
        self.rows = rows
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

    def run(self, module: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """``module(hidden)``, tile by tile; hidden [..., rows, D]."""
        count = self.needed(hidden.shape[-2]) if self.agreed is None else self.agreed
        if count == 1:
            return module(hidden)
        outputs = [_one_tile(module, tile, hidden) for tile in hidden.tensor_split(count, dim=-2)]
        return torch.cat(outputs, dim=-2)


def _one_tile(module: Callable[[torch.Tensor], torch.Tensor], tile: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """An empty tile runs on a dummy row with zero gradient, so that its collectives are made."""
    given = tile if tile.shape[-2] else hidden[..., :1, :]
    if torch.is_grad_enabled():
        out: Any = checkpoint(module, given, use_reentrant=False, preserve_rng_state=False)
    else:
        out = module(given)
    if not isinstance(out, torch.Tensor):
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
            # A module that was never cut is left alone altogether.
            if module is not None and (tiles is not None or hasattr(module, "vlm_pg_whole_forward")):
                _route(module, tiles)


def _route(module: Any, tiles: RowTiles | None) -> None:
    # The instance's forward, which liger-kernel may have replaced. A bound method: copy.deepcopy binds it to the copy,
    # where a closure would keep the original's weights.
    if not hasattr(module, "vlm_pg_whole_forward"):
        module.vlm_pg_whole_forward = module.forward
        module.forward = MethodType(_forward, module)
    module.vlm_pg_tiles = tiles


def _forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Calls with further arguments are not tiled.
    if self.vlm_pg_tiles is None or args or kwargs:
        return self.vlm_pg_whole_forward(hidden_states, *args, **kwargs)
    return self.vlm_pg_tiles.run(self.vlm_pg_whole_forward, hidden_states)

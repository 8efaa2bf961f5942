"""Each part of a model run on nothing: what a rank does while others need the part and it does not.

Where ranks gather weights or reduce gradients together, all of them must run the same parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vlm_pg.attention.tree import PrefixTree
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.network import Network


def idle_parts(network: Network) -> dict[str, Callable[[], object]]:
    """A run of each part whose result nobody uses; the same parts in the same order on every rank."""

    def decoder() -> torch.Tensor:
        token = torch.zeros(1, dtype=torch.int64, device=network.device)
        context = TreeContext(PrefixTree([1], [-1]), network.kernel_here)
        return network.run_layers(token, token.expand(3, 1), context)

    def head() -> torch.Tensor:
        width = network.model.get_input_embeddings().embedding_dim
        return network.model.lm_head(torch.zeros(1, width, device=network.device, dtype=network.dtype))

    parts: dict[str, Callable[[], object]] = {"decoder": decoder, "head": head}
    return {"vision": lambda: idle_vision(network), **parts} if network.family.reads_media else parts


def idle_vision(network: Network) -> torch.Tensor:
    """The tower on one empty visual token."""
    return network.family.encode_vision(network.model, *network.pixels.empty_token(network.device))

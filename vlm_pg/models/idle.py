"""Each part of a model run on nothing: what a rank does while others need the part and it does not.

Where ranks gather weights or reduce gradients together, all of them must run the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vlm_pg.attention.tree import PrefixTree
from vlm_pg.models.contexts import TreeContext

if TYPE_CHECKING:
    from vlm_pg.models.policy import Policy


def idle_parts(policy: Policy) -> dict[str, Callable[[], object]]:
    """A run of each part whose result nobody uses; the same parts in the same order on every rank."""

    def decoder() -> torch.Tensor:
        token = torch.zeros(1, dtype=torch.int64, device=policy.device)
        context = TreeContext(PrefixTree([1], [-1]), policy.kernel_here)
        return policy.run_layers(token, token.expand(3, 1), context, None, None)

    def head() -> torch.Tensor:
        width = policy.model.get_input_embeddings().embedding_dim
        return policy.model.lm_head(torch.zeros(1, width, device=policy.device, dtype=policy.dtype))

    parts: dict[str, Callable[[], object]] = {"decoder": decoder, "head": head}
    return {"vision": lambda: idle_vision(policy), **parts} if policy.family.reads_media else parts


def idle_vision(policy: Policy) -> torch.Tensor:
    """The tower on one empty visual token."""
    vision = policy.model.config.vision_config
    side = vision.spatial_merge_size
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, patch_dim, device=policy.device)
    grid = torch.tensor([[1, side, side]], device=policy.device)
    return policy.family.encode_vision(policy.model, pixels, grid)

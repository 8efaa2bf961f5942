"""What a vision tower keeps and takes, counted on the model's own code as layers and head are (``counted.py``).

The tower alone runs over a video, forward and, where something of it trains, back: transformers' blocks, our attention
over all frames, and checkpointing are in the count. Blocks are alike, so two towers of few of them say what all take.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_pg.models.settings import ModelSettings

# Temporal grids of the video, each of so many visual tokens along both sides: so many patches that gradients of
# weights, which do not grow, decide nothing.
FRAMES, SIDE = 16, 16
LEAST_BLOCKS = 2


@dataclass(frozen=True)
class TowerBytes:
    """Bytes a patch. ``running``: most while the tower runs forward, beside its pixels. ``kept``: between its forward
    and its backward, pixels and features apart. ``backward``: what there is beside that when most is alive on the way
    back, features and their gradient apart.
    """

    running: float
    kept: float = 0.0
    backward: float = 0.0


def count_tower(config: Any, settings: ModelSettings, dtype: Any, forget: Callable[[Any], None]) -> TowerBytes:
    """Of the tower of a transformers config.

    Args:
        settings: of the model, among them what of the tower trains and whether it is checkpointed.
        dtype: of weights and activations.
        forget: a hook for each weight, which lets go of its gradient; gradients are said elsewhere.
    """
    from vlm_pg.attention.kernels.cuda import CudaFlashKernel
    from vlm_pg.bench.paper.counter import fake_mode
    from vlm_pg.bench.paper.fake import fake_policy

    blocks = config.vision_config.depth
    # One block behind the last whose output is taken: what those keep is there in both towers when most is alive.
    few = max(LEAST_BLOCKS, 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ())))
    depths = (few, few + 1) if few + 1 < blocks else (blocks,)
    found: list[tuple[float, ...]] = []
    for depth in depths:
        fakes = fake_mode()
        build = partial(_of_blocks, config, depth, dtype)
        policy = fake_policy(build, settings, fakes, CudaFlashKernel())
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(forget)
        patches = FRAMES * SIDE**2 * policy.pixels.patches_per_token
        trains = any(p.requires_grad for p in policy.family.vision_tower(policy.model).parameters())
        found.append(tuple(value / patches for value in _run(policy, FRAMES, trains, fakes)))
    first, last = found[0], found[-1]
    more = blocks - depths[0]
    return TowerBytes(*(near + more * (far - near) for near, far in zip(first, last, strict=True)))


def _run(policy: Any, frames: int, trains: bool, fakes: Any) -> tuple[int, ...]:
    """``TowerBytes`` of all patches."""
    import torch

    from vlm_pg.bench.paper.counter import count

    pixels = policy.pixels
    side = SIDE * pixels.merge_size
    grid = torch.tensor([[frames, side, side]])
    width = pixels.channels * pixels.temporal_patch_size * pixels.patch_size**2
    with fakes:
        shown = torch.empty(frames * side**2, width, dtype=torch.float32)
    outs: list[Any] = []
    checkpointed = trains and policy.settings.gradient_checkpointing
    with torch.set_grad_enabled(trains):
        forward = count(lambda: outs.append(policy.run_tower(shown, grid)), fakes, collects=checkpointed)
    out = outs.pop()
    if not trains:
        return forward.peak_bytes, 0, 0
    kept = forward.end_bytes - out.nbytes
    with fakes:
        gradient = torch.empty_like(out)
    del out
    whole = count(lambda: policy.run_tower(shown, grid).backward(gradient), fakes, collects=checkpointed)
    return forward.peak_bytes, kept, whole.peak_bytes - kept - gradient.nbytes


def _of_blocks(config: Any, depth: int, dtype: Any) -> Any:
    """A model of a tower with so many blocks, and no decoder layer."""
    import torch
    import transformers

    from vlm_pg.models.registry import family_of
    from vlm_pg.models.vision import without_language

    config = without_language(copy.deepcopy(config))
    vision = config.vision_config
    if depth != vision.depth:
        vision.depth = depth
        if taken := getattr(vision, "deepstack_visual_indexes", None):
            # As many of them, at blocks that are there.
            vision.deepstack_visual_indexes = list(range(len(taken)))
    named = family_of(config).model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return model_class._from_config(config)
    finally:
        torch.set_default_dtype(usual)

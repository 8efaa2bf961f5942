"""What a vision tower keeps and takes, counted on the model's own code as layers and head are (``counted.py``).

The tower alone, all of its blocks, runs over two videos, forward and, where something of it trains, back; of both the
slope is what a patch takes. So transformers' blocks, our attention over all frames, and checkpointing are in the count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_pg.models.settings import ModelSettings

# Temporal grids of the two videos, each of so many visual tokens along both sides: as many patches as a frame may have.
FRAMES, SIDE = (8, 16), 16


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

    fakes = fake_mode()
    policy = fake_policy(lambda: _without_language(config, dtype), settings, fakes, CudaFlashKernel())
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(forget)
    trains = any(p.requires_grad for p in policy.family.vision_tower(policy.model).parameters())
    few, many = (_run(policy, frames, trains, fakes) for frames in FRAMES)
    patches = (FRAMES[1] - FRAMES[0]) * SIDE**2 * policy.pixels.patches_per_token
    return TowerBytes(*((more - less) / patches for less, more in zip(few, many, strict=True)))


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


def _without_language(config: Any, dtype: Any) -> Any:
    import torch
    import transformers

    from vlm_pg.models.registry import family_of
    from vlm_pg.models.vision_alone import without_language

    named = family_of(config).model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return model_class._from_config(without_language(copy.deepcopy(config)))
    finally:
        torch.set_default_dtype(usual)

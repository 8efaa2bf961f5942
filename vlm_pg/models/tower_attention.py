"""Which attention a vision tower runs on: on a GPU one call a layer for all frames, with or without flash-attn."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from vlm_pg.attention.frames import KERNEL, frames_forward
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.kernels.cuda import CudaFlashKernel
from vlm_pg.attention.kernels.flash_package import HEAD_DIM_MULTIPLE
from vlm_pg.attention.selfcheck import check_kernel
from vlm_pg.models.layer_globals import layer_global, set_layer_globals

# What a tower has that nobody has chosen an attention for: torch's own, frame by frame.
_FRAME_BY_FRAME = "sdpa"
# What an attention layer's forward asks under these names: whether its implementation takes all frames, and which
# function it is. The name in the configuration stays: transformers would look for a package behind a new one.
_ASKS, _FUNCTIONS = "is_flash_attention_requested", "ALL_ATTENTION_FUNCTIONS"
# On a tower whose layers attend to all frames.
_MARK = "vlm_pg_all_frames"


def attend_to_all_frames(model: Any, family: Any) -> None:
    """In one call a layer, where the tower's attention is torch's own and its flash kernel can run: on a GPU, in half
    precision. What somebody has chosen otherwise (flash_attention_2, eager) stays.

    The kernel is checked against plain softmax first; where it fails, frames stay apart, and a warning says so.
    """
    tower = family.vision_tower(model)
    if tower is None or tower.config._attn_implementation != _FRAME_BY_FRAME:
        return
    weight = next(tower.parameters())
    heads, head_dim = _heads(tower)
    kernel = frames_kernel(weight.device, weight.dtype)
    if kernel is None or head_dim % HEAD_DIM_MULTIPLE:
        return
    try:
        _check(kernel, weight.device, weight.dtype, heads, head_dim)
    except RuntimeError as error:
        warnings.warn(
            f"The vision tower attends frame by frame, which is slow: {error} Install flash-attn to have it attend to "
            "all frames at a time.",
            stacklevel=2,
        )
        return
    _set(tower)


def attend_on(model: Any, family: Any, kernel: Kernel) -> None:
    """To all frames in one call a layer of this kernel, unchecked: for work that is counted and not computed."""
    tower = family.vision_tower(model)
    if tower is None:
        return
    for module in _set(tower):
        setattr(module, KERNEL, kernel)


def attends_to_all_frames(tower: Any) -> bool:
    """Whether the tower's layers want lengths on the device, as with flash-attn."""
    from transformers.utils.generic import is_flash_attention_requested

    return takes_all_frames(tower) or is_flash_attention_requested(tower.config)


def takes_all_frames(tower: Any) -> bool:
    """Whether they attend by ``frames_forward``."""
    return getattr(tower, _MARK, False) and tower.config._attn_implementation == _FRAME_BY_FRAME


def frames_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The kernel that takes all frames at once from lengths on the device; None where it cannot run."""
    return CudaFlashKernel() if CudaFlashKernel.unavailable_because(device, dtype) is None else None


def _set(tower: Any) -> list[Any]:
    """The attention layers that now do so; none where their code asks otherwise than is known."""
    layers = [module for module in tower.modules() if hasattr(module, "qkv")]
    try:
        asks, functions = (layer_global(layers[0], name) for name in (_ASKS, _FUNCTIONS))
    except AttributeError:
        return []
    setattr(tower, _MARK, True)
    for layer in layers:
        set_layer_globals(layer, {_ASKS: _AllFrames(asks), _FUNCTIONS: _Functions(functions)})
    return layers


class _AllFrames:
    """``is_flash_attention_requested``, and yes of torch's own attention."""

    def __init__(self, theirs: Any):
        self._theirs = theirs

    def __call__(self, config: Any) -> bool:
        return config._attn_implementation == _FRAME_BY_FRAME or self._theirs(config)


class _Functions:
    """``ALL_ATTENTION_FUNCTIONS``, with ours behind the name of torch's own."""

    def __init__(self, theirs: Any):
        self._theirs = theirs

    def get_interface(self, name: str, default: Any) -> Any:
        return frames_forward if name == _FRAME_BY_FRAME else self._theirs.get_interface(name, default)


def _heads(tower: Any) -> tuple[int, int]:
    """How many, and of what size; all of a tower's attention layers are alike."""
    attention = next(module for module in tower.modules() if hasattr(module, "qkv"))
    heads = int(attention.num_heads)
    return heads, int(attention.qkv.out_features) // (3 * heads)


def _check(kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    check_kernel(kernel, device, dtype, heads, heads, head_dim)

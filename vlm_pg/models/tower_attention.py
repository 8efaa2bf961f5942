"""A vision tower's attention on a GPU: all frames, or windows of them, in one variable-length call a layer.

transformers' towers give all frames at once, with cumulative lengths, to the package flash-attn; to torch's own
attention they give each frame or window by itself: thousands of kernels a layer for a long video. Here the kernels of
grouped attention take all of them at once, with or without flash-attn.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vlm_pg.attention.grouped import grouped_attention
from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.kernels.base import HEAD_DIM_MULTIPLE
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.attention.plan import AttentionPlan
from vlm_pg.attention.selfcheck import check_kernel
from vlm_pg.attention.tree import PrefixTree, SegmentCall
from vlm_pg.models.layer_globals import layer_global, set_layer_globals

# transformers' default for towers: torch's own attention, frame by frame.
_FRAME_BY_FRAME = "sdpa"
# The globals by which an attention layer's forward tells whether its implementation takes all frames, and finds the
# function. The name in the configuration stays: transformers would look for a package behind a new one.
_IS_FLASH, _FUNCTIONS = "is_flash_attention_requested", "ALL_ATTENTION_FUNCTIONS"
# Attribute of a tower whose layers attend to all frames; attribute of an attention layer with a kernel of its own.
_ALL_FRAMES, _KERNEL = "vlm_pg_all_frames", "vlm_pg_frames_kernel"


def attend_to_all_frames(model: Any, family: Any) -> None:
    """One call a layer, where the tower's attention is torch's own and its flash kernel can run: on a GPU, in half
    precision. Any other choice (flash_attention_2, eager) stays.

    The kernel is checked against plain softmax first; where it fails, frames stay apart, with a warning.
    """
    tower = family.vision_tower(model)
    if tower is None or tower.config._attn_implementation != _FRAME_BY_FRAME:
        return
    weight = next(tower.parameters())
    attention = next(module for module in tower.modules() if hasattr(module, "qkv"))
    heads = int(attention.num_heads)
    head_dim = int(attention.qkv.out_features) // (3 * heads)
    kernel = frames_kernel(weight.device, weight.dtype)
    if kernel is None or head_dim % HEAD_DIM_MULTIPLE:
        return
    try:
        check_kernel(kernel, weight.device, weight.dtype, heads, heads, head_dim)
    except RuntimeError as error:
        warnings.warn(
            f"The vision tower attends frame by frame, which is slow: {error} Install flash-attn to have it attend to "
            "all frames at a time.",
            stacklevel=2,
        )
        return
    _route_to_all_frames(tower)


def attend_on(model: Any, family: Any, kernel: Kernel) -> None:
    """To all frames in one call a layer of this kernel, unchecked: for work that is counted and not computed."""
    tower = family.vision_tower(model)
    if tower is None:
        return
    for module in _route_to_all_frames(tower):
        setattr(module, _KERNEL, kernel)


def attends_to_all_frames(tower: Any) -> bool:
    """Whether the tower's layers want lengths on the device, as with flash-attn."""
    from transformers.utils.generic import is_flash_attention_requested

    return takes_all_frames(tower) or is_flash_attention_requested(tower.config)


def takes_all_frames(tower: Any) -> bool:
    """Whether the tower's layers attend by ``frames_forward``."""
    return getattr(tower, _ALL_FRAMES, False) and tower.config._attn_implementation == _FRAME_BY_FRAME


def frames_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The kernel that takes all frames at once from lengths on the device; None where it cannot run."""
    return CudaFlashKernel() if CudaFlashKernel.unavailable_because(device, dtype) is None else None


def _route_to_all_frames(tower: Any) -> list[Any]:
    """The attention layers that now use ``frames_forward``; none where their code lacks the known globals."""
    layers = [module for module in tower.modules() if hasattr(module, "qkv")]
    try:
        is_flash, functions = (layer_global(layers[0], name) for name in (_IS_FLASH, _FUNCTIONS))
    except AttributeError:
        return []
    setattr(tower, _ALL_FRAMES, True)
    for layer in layers:
        set_layer_globals(layer, {_IS_FLASH: _IsFlash(is_flash), _FUNCTIONS: _Functions(functions)})
    return layers


class _IsFlash:
    """``is_flash_attention_requested``, and True for torch's own attention."""

    def __init__(self, theirs: Any):
        self._theirs = theirs

    def __call__(self, config: Any) -> bool:
        return config._attn_implementation == _FRAME_BY_FRAME or self._theirs(config)


class _Functions:
    """``ALL_ATTENTION_FUNCTIONS``, with ``frames_forward`` under the name of torch's own attention."""

    def __init__(self, theirs: Any):
        self._theirs = theirs

    def get_interface(self, name: str, default: Any) -> Any:
        return frames_forward if name == _FRAME_BY_FRAME else self._theirs.get_interface(name, default)


def frames_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: q, k, v [1, N, T, H] of all frames -> ([1, T, N, H], no weights).

    Args:
        cu_seq_lens_q: [frames + 1], cumulative; every patch attends to all of its own frame or window.
        max_length_q: length of the longest frame or window; None: read from the device, for which the host waits.
    """
    if dropout:
        raise ValueError(f"Attention over frames got dropout={dropout}; only 0 is supported. Set attention_dropout=0.")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    kernel = getattr(module, _KERNEL, None) or _kernel_for(q.device, q.dtype)
    tokens = len(q)
    if isinstance(kernel, CudaFlashKernel):
        cumulative = cu_seq_lens_q.to(torch.int32)
        longest = int(cumulative.diff().max()) if max_length_q is None else max_length_q
        # The host knows only the longest length, which is all that this kernel needs.
        call = SegmentCall((0, tokens), (0, tokens), (), (), causal=False, at_most=(longest, longest))
        call.fixed_on(cumulative, cumulative)
    else:
        # Others cut tensors by lengths, for which the host would wait on a GPU.
        lengths = tuple(end - start for start, end in pairwise(cu_seq_lens_q.tolist()))
        call = SegmentCall((0, tokens), (0, tokens), lengths, lengths, causal=False)
    plan = AttentionPlan(PrefixTree([tokens], [-1]), (call,), ())
    return grouped_attention(q, k, v, plan, scaling, kernel).unsqueeze(0), None


def _kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """torch's own flash attention; after a later move or cast of the weights, any kernel that runs there."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return frames_kernel(device, dtype) or select_kernel(device, dtype)

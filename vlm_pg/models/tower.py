"""A vision tower: the geometry of its patches, arguments made of grids on the host, input in pieces, and attention.

transformers' towers read each frame's length from the grids in every layer; on a GPU each read waits for everything
that is queued. Their functions (``transformers.vision_utils``) compute the same from grids on the host, and
a tower takes the results as arguments.

A tower's input may be cut between frames: Qwen's towers attend within one temporal grid (and within windows of it),
whatever else is in the call; positions are of height and width alone. So a video of (t, h, w) patches can run as
several videos of (t1, h, w), (t2, h, w), ...

On a GPU transformers' towers give all frames at once, with cumulative lengths, to the package flash-attn; to torch's
own attention they give each frame or window by itself: thousands of kernels a layer for a long video. Here the kernels
of grouped attention take all of them at once, with or without flash-attn.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlm_pg.attention.grouped import grouped_attention
from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.kernels.base import HEAD_DIM_MULTIPLE
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.attention.plan import AttentionPlan
from vlm_pg.attention.selfcheck import check_kernel
from vlm_pg.attention.tree import PrefixTree, SegmentCall
from vlm_pg.models.layer_globals import layer_global, set_layer_globals

_KNOWN = frozenset(
    {
        "get_vision_position_ids",
        "get_vision_attention_seqlens",
        "get_vision_window_index",
        "get_vision_interpolation_indices_and_weights",
    }
)


def tower_inputs(tower: Any, grid_thw: Tensor, device: torch.device) -> dict[str, Any]:
    """Keyword arguments for ``tower``'s forward, beside its pixels.

    Args:
        tower: transformers' module. Of one that does not work with the known functions nothing is made beforehand.
        grid_thw: int64 [media, 3], best on the host: elsewhere it is fetched, for which the host waits once.
        device: where the tower runs.
    """
    from transformers import vision_utils

    called = {name for name in vars(sys.modules[type(tower).__module__]) if name.startswith("get_vision_")}
    if not called or called - _KNOWN:
        return {"grid_thw": grid_thw.to(device, non_blocking=True)}
    grids = grid_thw.cpu()
    made: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grids, tower.spatial_merge_size)}
    cumulative = {"": vision_utils.get_vision_cu_seqlens(grids)}
    if "get_vision_window_index" in called:
        made["window_index"], cumulative["window_"] = vision_utils.get_vision_window_index(
            grids, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
    if "get_vision_interpolation_indices_and_weights" in called:
        made["interp_indices"], made["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.config.spatial_merge_size,
        )
    made = {name: x.to(device, non_blocking=True) for name, x in made.items()}
    at_once = attends_to_all_frames(tower)
    for kind, lengths in cumulative.items():
        # Attention over all frames at once reads the lengths on the device and takes the longest; others split by them.
        made[f"cu_{kind}seqlens"] = lengths.to(device, non_blocking=True) if at_once else lengths
        if at_once:
            made[f"max_{kind}seqlen"] = int(lengths.diff().max())
    return made | {"grid_thw": grids}


@dataclass(frozen=True)
class PixelGeometry:
    """``patch_size`` in pixels a side, ``merge_size`` in patches a side, ``temporal_patch_size`` in frames.

    All are 1 for a model without a tower.
    """

    patch_size: int = 1
    merge_size: int = 1
    temporal_patch_size: int = 1
    channels: int = 1

    @classmethod
    def of(cls, config: Any) -> PixelGeometry:
        """As the config of Qwen's models says."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return cls()
        return cls(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size, vision.in_channels)

    @property
    def token_side(self) -> int:
        """Pixels per side of one visual token."""
        return self.patch_size * self.merge_size

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    def empty_token(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """One visual token of zeros: pixel_values [patches, dim] on the device, and grid_thw [1, 3] on the host."""
        dim = self.channels * self.temporal_patch_size * self.patch_size**2
        grid = torch.tensor([[1, self.merge_size, self.merge_size]])
        return torch.zeros(self.patches_per_token, dim, device=device), grid


Grid = tuple[int, int, int]


class VisionPiece(NamedTuple):
    """Some consecutive frames: ``grids`` (t, h, w) as the tower takes them, and patches ``start`` to ``stop``."""

    grids: tuple[Grid, ...]
    start: int
    stop: int

    @property
    def patches(self) -> int:
        return self.stop - self.start

    def grid_thw(self) -> Tensor:
        """int64 [media, 3], on the host."""
        return torch.tensor(self.grids)


def pieces(grid_thw: Iterable[Sequence[int]], most_patches: int) -> list[VisionPiece]:
    """The frames of all media, in order, in pieces of at most ``most_patches``.

    Args:
        grid_thw: (frames, height, width) of each image or video, in patches; a frame here is one temporal grid.
        most_patches: of one piece. A frame is never cut: one that has more is a piece of its own.

    Returns:
        Pieces that follow each other without a gap; each takes as many frames as fit behind the piece before.

    Raises:
        ValueError: ``most_patches`` is below 1.
    """
    if most_patches < 1:
        raise ValueError(f"most_patches is {most_patches}; it must be at least 1.")
    found: list[VisionPiece] = []
    grids: list[Grid] = []
    start = stop = 0
    for frames, height, width in ((int(t), int(h), int(w)) for t, h, w in grid_thw):
        left, frame = frames, height * width
        while left:
            fitting = max(0, min(left, (most_patches - (stop - start)) // frame))
            if not fitting and grids:
                found.append(VisionPiece(tuple(grids), start, stop))
                grids, start = [], stop
                continue
            fitting = max(1, fitting)
            grids.append((fitting, height, width))
            stop += fitting * frame
            left -= fitting
    if grids:
        found.append(VisionPiece(tuple(grids), start, stop))
    return found


def shares(grid_thw: Iterable[Sequence[int]], parts: int) -> list[VisionPiece]:
    """The frames of all media, in order, in exactly ``parts`` pieces, the largest of them as small as it can be.

    Pieces beyond the number of frames are empty (no grids, no patches).

    Raises:
        ValueError: ``parts`` is below 1.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; it must be at least 1.")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thw]
    low, high = 1, max(1, sum(t * h * w for t, h, w in grids))
    while low < high:
        middle = (low + high) // 2
        # Frames that are larger than the bound are no cut of that bound.
        if len(found := pieces(grids, middle)) <= parts and max((p.patches for p in found), default=0) <= middle:
            high = middle
        else:
            low = middle + 1
    found = pieces(grids, high)
    end = found[-1].stop if found else 0
    return found + [VisionPiece((), end, end)] * (parts - len(found))


def run_pieces(
    tower: Callable[[Tensor, Tensor], Tensor],
    cut: Sequence[VisionPiece],
    pixel_values: Tensor,
    nothing: tuple[Tensor, Tensor],
    calls: int,
    recompute: bool = True,
) -> Tensor:
    """The tower on one piece after the other.

    With gradients and ``recompute`` each piece is a checkpoint of its own: what it computes on its way is thrown away
    and computed again in backward, so that one piece's activations are alive at a time.

    Args:
        tower: (pixel_values [patches, dim], grid_thw [media, 3] on the host) -> [M, ...].
        cut: pieces of all of ``pixel_values``, in order.
        pixel_values: [patches, dim].
        nothing: pixel_values and grid_thw of one empty visual token.
        calls: of the tower; those beyond the pieces run on ``nothing``, and their gradient is zero.

    Returns:
        [M, ...] of all pieces.
    """
    inputs = [(pixel_values[piece.start : piece.stop], piece.grid_thw()) for piece in cut]
    inputs += [nothing] * (calls - len(inputs))
    if len(inputs) == 1:
        return tower(*inputs[0])
    if recompute and torch.is_grad_enabled():
        outputs = [checkpoint(tower, *each, use_reentrant=False, preserve_rng_state=False) for each in inputs]
    else:
        outputs = [tower(*each) for each in inputs]
    return torch.cat(outputs[: len(cut)] + [out[:0] for out in outputs[len(cut) :]])


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

"""Where a tower's input may be cut: between frames.

Qwen's towers attend within one temporal grid (and within windows of it), whatever else is in the call; positions are of
height and width alone. So a video of (t, h, w) patches is as well several videos of (t1, h, w), (t2, h, w), ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

Grid = tuple[int, int, int]


class VisionPiece(NamedTuple):
    """Some consecutive frames: ``grids`` (t, h, w) as the tower takes them, and patches ``start`` to ``stop``."""

    grids: tuple[Grid, ...]
    start: int
    stop: int

    @property
    def patches(self) -> int:
        return self.stop - self.start

    def grid_thw(self) -> torch.Tensor:
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
    tower: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    cut: Sequence[VisionPiece],
    pixel_values: torch.Tensor,
    nothing: tuple[torch.Tensor, torch.Tensor],
    calls: int,
    recompute: bool = True,
) -> torch.Tensor:
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

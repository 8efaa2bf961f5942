"""What a vision tower works out from grids alone, made on the host before it runs.

transformers' towers ask the grids how long each frame's segment is, in every layer; on a GPU each question waits for
everything that is queued. Their functions (``transformers.vision_utils``) say the same from grids on the host, and a
tower takes what it is given in place of asking.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from vlm_pg.models.tower_attention import attends_to_all_frames

_KNOWN = frozenset(
    {
        "get_vision_position_ids",
        "get_vision_attention_seqlens",
        "get_vision_window_index",
        "get_vision_interpolation_indices_and_weights",
    }
)


def tower_inputs(tower: Any, grid_thw: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Keyword arguments for ``tower``'s forward, beside its pixels.

    Args:
        tower: transformers' module. Of one that does not work with the known functions nothing is made beforehand.
        grid_thw: int64 [media, 3], best on the host: elsewhere it is fetched, for which the host waits once.
        device: where the tower runs.
    """
    from transformers import vision_utils

    asks = {name for name in vars(sys.modules[type(tower).__module__]) if name.startswith("get_vision_")}
    if not asks or asks - _KNOWN:
        return {"grid_thw": grid_thw.to(device, non_blocking=True)}
    grids = grid_thw.cpu()
    made: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grids, tower.spatial_merge_size)}
    cumulative = {"": vision_utils.get_vision_cu_seqlens(grids)}
    if "get_vision_window_index" in asks:
        made["window_index"], cumulative["window_"] = vision_utils.get_vision_window_index(
            grids, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
    if "get_vision_interpolation_indices_and_weights" in asks:
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

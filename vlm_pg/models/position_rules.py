"""The two rules for a prompt's rotary positions (``model.positions``), asked with grids as processors give them.

Shape letters: P prompt tokens.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch

from vlm_pg.errors import ModelError
from vlm_pg.models.positions import MergedGrid, grid_times, one_per_grid, qwen_positions
from vlm_pg.types import MediaKind

# What tells a video's temporal grids apart; ``Family`` says what each means.
VideoTime = Literal["grids", "seconds", "text"]

_UNCUT_SECONDS_FROM = (5, 18)


class PromptGrids(NamedTuple):
    """What positions are counted from.

    ``input_ids``, ``mm_token_type_ids``: int64 [P]. ``grid_thw``: int64 [media, 3] before merging, or None.
    ``second_per_grid_ts``: one entry per video, or none.
    """

    input_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor
    grid_thw: torch.Tensor | None
    media_kinds: tuple[MediaKind, ...]
    second_per_grid_ts: tuple[float, ...]


def by_transformers(model: Any, prompt: PromptGrids) -> torch.Tensor:
    """int64 [3, P] as the installed transformers counts."""
    input_ids, mm_token_type_ids, grid_thw, media_kinds, second_per_grid_ts = prompt
    if grid_thw is None:
        return torch.arange(input_ids.shape[0]).expand(3, -1).clone()
    _refuse_cut_seconds(second_per_grid_ts)
    grids: dict[MediaKind, list[torch.Tensor]] = {"image": [], "video": []}
    for kind, grid in zip(media_kinds, grid_thw, strict=True):
        grids[kind].append(grid)
    # Only Qwen2.5-VL reads seconds; the processors of the other families hand over none.
    seconds = {"second_per_grid_ts": list(second_per_grid_ts)} if second_per_grid_ts else {}
    positions, _ = model.model.get_rope_index(
        input_ids[None],
        mm_token_type_ids[None],
        image_grid_thw=torch.stack(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.stack(grids["video"]) if grids["video"] else None,
        **seconds,
    )
    return positions[:, 0]


def by_qwen(
    video_time: VideoTime, merge_size: int, positions_per_second: float | None, prompt: PromptGrids
) -> torch.Tensor:
    """int64 [3, P] by Qwen's published rule."""
    _, mm_token_type_ids, grid_thw, media_kinds, second_per_grid_ts = prompt
    videos = media_kinds.count("video")
    if second_per_grid_ts and len(second_per_grid_ts) != videos:
        raise ValueError(
            f"Got second_per_grid_ts for {len(second_per_grid_ts)} videos, but the prompt has {videos}; give one entry "
            "per video, or none."
        )
    # Without seconds a temporal grid lasts one, as in Qwen's code.
    seconds = iter(second_per_grid_ts or (1.0,) * videos)
    media = []
    for kind, grid in zip(media_kinds, () if grid_thw is None else grid_thw.tolist(), strict=True):
        times, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
        clock = grid_times(times, positions_per_second, next(seconds)) if kind == "video" else grid_times(times)
        media.append(MergedGrid(kind, clock, rows, columns))
    return qwen_positions(mm_token_type_ids, one_per_grid(media) if video_time == "text" else media)


def _refuse_cut_seconds(second_per_grid_ts: tuple[float, ...]) -> None:
    """transformers before 5.18 cuts seconds per temporal grid to whole ones: at 4 frames a second time stands still."""
    cut = [seconds for seconds in second_per_grid_ts if seconds != int(seconds)]
    installed = version("transformers")
    if cut and tuple(int(part) for part in installed.split(".")[:2]) < _UNCUT_SECONDS_FROM:
        raise ModelError(
            f"model.positions is transformers, a video has {cut[0]:g} seconds per temporal patch, and transformers "
            f"{installed} cuts that to {int(cut[0])}. Set model.positions=qwen, install transformers 5.18 or later, or "
            "sample frames so that a temporal patch (two frames) takes whole seconds."
        )

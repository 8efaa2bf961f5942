"""Multimodal rotary positions (``model.positions``): by Qwen's published rule, or as the installed transformers counts.

Each token has three positions (time, height, width). By Qwen's rule:

- text: all three equal, one more than the token before;
- a medium that starts at position s: (s + time, s + row, s + column) over its merged grid;
- what follows a medium, the response too: one past the largest position of any axis before it.

Source: multimodal rotary embedding (M-RoPE) in https://arxiv.org/abs/2409.12191, absolute time in
https://arxiv.org/abs/2502.13923, and the ``get_rope_index`` that Qwen published with the weights (transformers 4.45 to
4.57; vLLM and SGLang compute the same).

Shape letters: P prompt tokens, T temporal grids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vlm_pg.errors import ModelError
from vlm_pg.types import MediaKind

# How a model tells a video's temporal grids apart; ``Family`` explains each.
VideoTime = Literal["grids", "seconds", "text"]
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}
_WHOLE_SECONDS_BEFORE = (5, 18)


class PromptGrids(NamedTuple):
    """Input of a position rule.

    ``input_ids``, ``mm_token_type_ids``: int64 [P]. ``grid_thw``: int64 [media, 3] before merging, or None.
    ``second_per_grid_ts``: one entry per video, or none.
    """

    input_ids: Tensor
    mm_token_type_ids: Tensor
    grid_thw: Tensor | None
    media_kinds: tuple[MediaKind, ...]
    second_per_grid_ts: tuple[float, ...]


def by_qwen(video_time: VideoTime, merge_size: int, positions_per_second: float | None, prompt: PromptGrids) -> Tensor:
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


def by_transformers(model: Any, prompt: PromptGrids) -> Tensor:
    """int64 [3, P] as the installed transformers counts."""
    input_ids, mm_token_type_ids, grid_thw, media_kinds, second_per_grid_ts = prompt
    if grid_thw is None:
        return torch.arange(input_ids.shape[0]).expand(3, -1).clone()
    # Before 5.18 it cuts seconds per temporal grid to whole ones: at 4 frames a second time stands still.
    cut = [seconds for seconds in second_per_grid_ts if seconds != int(seconds)]
    installed = version("transformers")
    if cut and tuple(int(part) for part in installed.split(".")[:2]) < _WHOLE_SECONDS_BEFORE:
        raise ModelError(
            f"model.positions is transformers, a video has {cut[0]:g} seconds per temporal patch, and transformers "
            f"{installed} cuts that to {int(cut[0])}. Set model.positions=qwen, install transformers 5.18 or later, or "
            "sample frames so that a temporal patch (two frames) takes whole seconds."
        )
    grids: dict[MediaKind, list[Tensor]] = {"image": [], "video": []}
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


@dataclass(frozen=True)
class MergedGrid:
    """A medium as the language model reads it: ``times`` int64 [T] from 0 on, ``rows`` x ``columns`` tokens at each."""

    kind: MediaKind
    times: Tensor
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return len(self.times) * self.rows * self.columns

    @property
    def positions_3M(self) -> Tensor:
        """int64 [3, T * rows * columns], counted from the medium's start; time is the slowest axis."""
        axes = (self.times, torch.arange(self.rows), torch.arange(self.columns))
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def qwen_positions(mm_token_type_ids: Tensor, media: Sequence[MergedGrid]) -> Tensor:
    """Positions int64 [3, P] of a prompt.

    Args:
        mm_token_type_ids: int64 [P]; 0 text, 1 image, 2 video.
        media: in order of appearance; two of them may stand side by side.

    Raises:
        ValueError: token types and media do not belong together.
    """
    types = mm_token_type_ids.tolist()
    waiting = iter(media)
    parts: list[Tensor] = []
    token = start = 0
    while token < len(types):
        if types[token] == 0:
            end = next((end for end in range(token, len(types)) if types[end]), len(types))
            part = torch.arange(end - token).expand(3, -1)
        else:
            part = _medium(types, token, next(waiting, None)).positions_3M
        parts.append(part + start)
        token += part.shape[1]
        start = int(parts[-1].max()) + 1
    if (left := next(waiting, None)) is not None:
        raise _mismatch(f"one {left.kind} of {left.num_tokens} tokens is left over")
    return torch.cat(parts, dim=1) if parts else torch.empty(3, 0, dtype=torch.int64)


def grid_times(grids: int, positions_per_second: float | None = None, seconds_per_grid: float = 1.0) -> Tensor:
    """int64 [T] time positions of ``grids`` temporal grids, from 0 on.

    ``positions_per_second`` (the config's ``tokens_per_second``) None: one position a grid, whatever its seconds. Else
    fractions are cut off after the product, which is rounded to float32 in the order of Qwen's code.
    """
    index = torch.arange(grids)
    if positions_per_second is None:
        return index
    return (index * seconds_per_grid * positions_per_second).long()


def one_per_grid(media: Iterable[MergedGrid]) -> list[MergedGrid]:
    """Every temporal grid as a medium of its own at time 0: for models that write the time into the text."""
    zero = torch.zeros(1, dtype=torch.int64)
    return [MergedGrid(medium.kind, zero, medium.rows, medium.columns) for medium in media for _ in medium.times]


def _medium(types: Sequence[int], token: int, medium: MergedGrid | None) -> MergedGrid:
    """The medium that starts at ``token``, after a check that all its tokens are there."""
    if medium is None:
        raise _mismatch(f"token {token} is visual, and no medium is left for it")
    expected = [TOKEN_TYPES[medium.kind]] * medium.num_tokens
    if list(types[token : token + medium.num_tokens]) != expected:
        raise _mismatch(f"one {medium.kind} of {medium.num_tokens} tokens does not fit the token types from {token} on")
    return medium


def _mismatch(fault: str) -> ValueError:
    return ValueError(
        f"Token types and media grids do not belong together: {fault}. Give ids, token types and grids of one "
        "processor call, without truncation."
    )

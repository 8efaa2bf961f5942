"""Multimodal rotary positions by Qwen's published rule: pure functions of token types and grids.

Each token has three positions (time, height, width):

- text: all three equal, one more than the token before;
- a medium that starts at position s: (s + time, s + row, s + column) over its merged grid;
- what follows a medium: one past the largest position of any axis of what came before. So does the response.

Source: multimodal rotary embedding (M-RoPE) in https://arxiv.org/abs/2409.12191, absolute time in
https://arxiv.org/abs/2502.13923, and the ``get_rope_index`` that Qwen published with the weights (transformers 4.45 to
4.57; vLLM and SGLang compute the same).

Shape letters: P prompt tokens, T temporal grids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.types import MediaKind

TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}


@dataclass(frozen=True)
class MergedGrid:
    """A medium as the language model reads it: ``times`` int64 [T] from 0 on, ``rows`` x ``columns`` tokens at each."""

    kind: MediaKind
    times: torch.Tensor
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return len(self.times) * self.rows * self.columns

    @property
    def positions_3M(self) -> torch.Tensor:
        """int64 [3, T * rows * columns], counted from the medium's start; time is the slowest axis."""
        axes = (self.times, torch.arange(self.rows), torch.arange(self.columns))
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def qwen_positions(mm_token_type_ids: torch.Tensor, media: Sequence[MergedGrid]) -> torch.Tensor:
    """Positions int64 [3, P] of a prompt.

    Args:
        mm_token_type_ids: int64 [P]; 0 text, 1 image, 2 video.
        media: in order of appearance; two of them may stand side by side.

    Raises:
        ValueError: token types and media do not belong together.
    """
    types = mm_token_type_ids.tolist()
    waiting = iter(media)
    parts: list[torch.Tensor] = []
    place = start = 0
    while place < len(types):
        if types[place] == 0:
            part = torch.arange(_run_length(types, place)).expand(3, -1)
        else:
            part = _medium(types, place, next(waiting, None)).positions_3M
        parts.append(part + start)
        place += part.shape[1]
        start = int(parts[-1].max()) + 1
    if (left := next(waiting, None)) is not None:
        raise _mismatch(f"one {left.kind} of {left.num_tokens} tokens is left over")
    return torch.cat(parts, dim=1) if parts else torch.empty(3, 0, dtype=torch.int64)


def grid_times(grids: int, positions_per_second: float | None = None, seconds_per_grid: float = 1.0) -> torch.Tensor:
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


def _run_length(types: Sequence[int], start: int) -> int:
    stop = start
    while stop < len(types) and types[stop] == types[start]:
        stop += 1
    return stop - start


def _medium(types: Sequence[int], place: int, medium: MergedGrid | None) -> MergedGrid:
    """The medium whose first token is at ``place``, after a check that all its tokens are there."""
    if medium is None:
        raise _mismatch(f"token {place} is visual, and no medium is left for it")
    expected = [TOKEN_TYPES[medium.kind]] * medium.num_tokens
    if list(types[place : place + medium.num_tokens]) != expected:
        raise _mismatch(f"one {medium.kind} of {medium.num_tokens} tokens does not fit the token types from {place} on")
    return medium


def _mismatch(what: str) -> ValueError:
    return ValueError(
        f"Token types and media grids do not belong together: {what}. Give ids, token types and grids of one processor "
        "call, without truncation."
    )

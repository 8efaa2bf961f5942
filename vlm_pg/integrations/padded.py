"""Padded rows of another trainer to groups, and values per token back to padded rows.

Shape letters: W rows, P prompt columns (padded at the left), R response columns (padded at the right).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.models.packing import packed_tokens, repeated_tokens
from vlm_pg.prompts.processor_outputs import content_key, prompt_from_processor
from vlm_pg.types import Prompt, ResponseGroup


@dataclass(frozen=True)
class GroupedRows:
    """``groups``: one per distinct prompt; ``rows``: for each of its responses, the row it came from.

    ``response_mask`` bool [W, R]: the tokens that have values.
    """

    groups: list[ResponseGroup]
    rows: list[list[int]]
    response_mask: torch.Tensor

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Values per response token, [sum of lengths] in group order -> [W, R], zero where there is no token."""
        lengths = [len(response) for group in self.groups for response in group.responses]
        order = [row for rows in self.rows for row in rows]
        by_row = dict(zip(order, values.split(lengths), strict=True))
        real = self.response_mask.sum(-1).tolist()
        # A row without tokens was scored on one that does not count; it keeps the result attached to the graph.
        parts = [by_row[row][:length] for row, length in enumerate(real)]
        return values.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask, torch.cat(parts))

    def chunks(self, max_rows: int | None) -> Iterator[list[ResponseGroup]]:
        """The groups in order, as many at a time as have ``max_rows`` responses together (at least one group)."""
        chunk: list[ResponseGroup] = []
        for group in self.groups:
            if chunk and max_rows and sum(len(g.responses) for g in [*chunk, group]) > max_rows:
                yield chunk
                chunk = []
            chunk.append(group)
        yield chunk

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that go through the model grouped, and repeated without padding."""
        shapes = [(group.prompt.num_tokens, [len(r) for r in group.responses]) for group in self.groups]
        return sum(packed_tokens(*shape) for shape in shapes), sum(repeated_tokens(*shape) for shape in shapes)

    @property
    def summary(self) -> str:
        """What sharing did, in one line."""
        grouped, repeated = self.tokens
        line = (
            f"{sum(map(len, self.rows))} responses of {len(self.groups)} prompt(s) through the model as "
            f"{grouped} tokens instead of {repeated}"
        )
        return line + (
            f" (sharing ratio {repeated / grouped:.2f})"
            if repeated > grouped
            else ": no two rows share a prompt, so nothing is saved; put all generations of a prompt into one batch"
        )


def group_rows(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_columns: int,
    position_fn: Callable[..., torch.Tensor],
    mm_token_type_ids: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
    image_grid_thw: torch.Tensor | None = None,
    num_images: Sequence[int] | None = None,
) -> GroupedRows:
    """Rows with equal prompts and equal images become one group, wherever in the batch they stand.

    Args:
        input_ids, attention_mask, mm_token_type_ids: [W, P + R]; the last R = ``response_columns`` are responses.
        position_fn: as ``prompt_from_processor`` takes it.
        pixel_values, image_grid_thw: patches and grids of all images, row by row; ``num_images`` per row.

    Raises:
        ValueError: masked tokens inside a response, or images in a response.
    """
    # What sits on the graph stays where it is; ids and pixels are compared and hashed on the CPU.
    ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
    types = torch.zeros_like(ids) if mm_token_type_ids is None else mm_token_type_ids.cpu()
    start = ids.shape[1] - response_columns
    lengths = mask[:, start:].sum(-1)
    if (mask[:, start:] != (torch.arange(response_columns) < lengths[:, None])).any():
        raise ValueError("A response has masked tokens inside it; its mask must be ones, then zeros.")
    if types[:, start:].any():
        raise ValueError(
            "A response contains image or video tokens; only prompts may. Let tools return text, or score this batch "
            "with the trainer's own class."
        )
    images = _images_by_row(len(ids), pixel_values, image_grid_thw, num_images)
    prompts: dict[tuple[bytes, str], Prompt] = {}
    responses: dict[tuple[bytes, str], list[torch.Tensor]] = {}
    rows: dict[tuple[bytes, str], list[int]] = {}
    for row, (pixels, grids) in enumerate(images):
        real = mask[row, :start]
        prompt_ids = ids[row, :start][real]
        key = (prompt_ids.numpy().tobytes(), content_key(pixels, grids))
        if key not in prompts:
            inputs = {"input_ids": prompt_ids[None], "mm_token_type_ids": types[row, :start][real][None]}
            if pixels is not None and grids is not None:
                inputs |= {"pixel_values": pixels, "image_grid_thw": grids}
            prompts[key] = prompt_from_processor(inputs, position_fn, f"row {row}")
        responses.setdefault(key, []).append(ids[row, start : start + max(1, int(lengths[row]))])
        rows.setdefault(key, []).append(row)
    groups = [ResponseGroup(prompt, tuple(responses[key])) for key, prompt in prompts.items()]
    return GroupedRows(groups, [rows[key] for key in prompts], attention_mask[:, start:].bool())


def _images_by_row(
    num_rows: int, pixel_values: torch.Tensor | None, grids: torch.Tensor | None, num_images: Sequence[int] | None
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Pixels and grids of each row on the CPU, or None where a row has no image."""
    given = [part is not None for part in (pixel_values, grids, num_images)]
    if any(given) and not all(given) and (given[0] or given[1]):
        raise ValueError(
            "Images came without all of pixel_values, image_grid_thw and num_images; pass all three, or none."
        )
    if pixel_values is None or grids is None or num_images is None:
        return [(None, None)] * num_rows
    grids_by_row = grids.cpu().split(list(num_images))
    pixels_by_row = pixel_values.cpu().float().split([int(grid.prod(-1).sum()) for grid in grids_by_row])
    return [(p, g) if len(g) else (None, None) for p, g in zip(pixels_by_row, grids_by_row, strict=True)]

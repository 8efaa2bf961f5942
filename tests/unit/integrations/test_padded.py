"""Padded rows to groups and back: which rows share, where values go, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlm_pg.integrations.padded import group_rows

PAD = 0


def count_up(ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.arange(len(ids)).expand(3, -1)


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompts padded at the left, responses at the right."""
    width = max(len(prompt) for prompt, _ in rows)
    columns = max(len(response) for _, response in rows)
    ids, mask = [], []
    for prompt, response in rows:
        left, right = width - len(prompt), columns - len(response)
        ids.append([PAD] * left + prompt + response + [PAD] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
    return torch.tensor(ids), torch.tensor(mask), columns


def test_rows_with_equal_prompts_share_wherever_they_stand() -> None:
    rows = group_rows(*padded([([1, 2], [7, 8]), ([3], [9]), ([1, 2], [5, 6, 4])]), count_up)
    assert [group.prompt.input_ids.tolist() for group in rows.groups] == [[1, 2], [3]]
    assert [[r.tolist() for r in group.responses] for group in rows.groups] == [[[7, 8], [5, 6, 4]], [[9]]]
    assert rows.rows == [[0, 2], [1]]
    # Group order 7 8 | 5 6 4 | 9, back in row order.
    scattered = rows.scatter(torch.tensor([7.0, 8, 5, 6, 4, 9]))
    assert scattered.tolist() == [[7, 8, 0], [9, 0, 0], [5, 6, 4]]
    # 2 + 1 + 2 and 1 + 0 tokens, instead of 3 + 4 and 1: the last token of a response is never read.
    assert rows.tokens == (6, 8)
    assert rows.summary.endswith(
        "3 responses of 2 prompt(s) through the model as 6 tokens instead of 8 (sharing ratio 1.33)"
    )


def test_equal_words_about_different_images_do_not_share() -> None:
    ids, mask, columns = padded([([1, 9, 2], [7]), ([1, 9, 2], [8]), ([1, 9, 2], [6])])
    types = (ids == 9).long()
    pixels = torch.arange(12.0).reshape(12, 1)
    pixels[8:] = pixels[:4]  # the third row shows the first row's image
    grids = torch.tensor([[1, 2, 2]] * 3)
    rows = group_rows(ids, mask, columns, count_up, types, pixels, grids, [1, 1, 1])
    assert rows.rows == [[0, 2], [1]]
    assert torch.equal(rows.groups[1].prompt.pixel_values, pixels[4:8])
    assert [group.prompt.media_kinds for group in rows.groups] == [("image",), ("image",)]


def test_a_row_without_tokens_has_no_values_but_stays_on_the_graph() -> None:
    ids, mask, columns = padded([([1], [7, 8]), ([1], [5, 6])])
    mask[1, 1:] = 0
    rows = group_rows(ids, mask, columns, count_up)
    values = torch.ones(3, requires_grad=True)
    scattered = rows.scatter(values)
    assert scattered.tolist() == [[1, 1], [0, 0]]
    scattered.sum().backward()
    assert values.grad.tolist() == [1, 1, 0]  # type: ignore[union-attr]
    mask[0, 1:] = 0
    rows = group_rows(ids, mask, columns, count_up)
    assert rows.scatter(torch.ones(2, requires_grad=True)).requires_grad


def test_chunks_hold_whole_groups() -> None:
    rows = group_rows(*padded([([p], [7]) for p in (1, 1, 2, 2, 3, 3, 3)]), count_up)
    assert [[len(g.responses) for g in chunk] for chunk in rows.chunks(None)] == [[2, 2, 3]]
    assert [[len(g.responses) for g in chunk] for chunk in rows.chunks(4)] == [[2, 2], [3]]
    assert [[len(g.responses) for g in chunk] for chunk in rows.chunks(1)] == [[2], [2], [3]]
    assert "nothing is saved; put all generations" in group_rows(*padded([([1], [7]), ([2], [7])]), count_up).summary


def test_what_has_no_meaning_is_refused() -> None:
    ids, mask, columns = padded([([1], [7, 8, 9])])
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="must be ones, then zeros"):
        group_rows(ids, mask, columns, count_up)
    types = torch.zeros_like(ids)
    types[0, 3] = 1
    with pytest.raises(ValueError, match="only prompts may"):
        group_rows(ids, torch.ones_like(ids), columns, count_up, types)

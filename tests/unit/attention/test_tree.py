"""PrefixTree: which tokens see which, which calls that takes, and which orders are refused."""

from __future__ import annotations

import pytest
import torch

from vlm_pg.attention import PrefixTree


def test_from_groups_lays_out_prefixes_then_responses() -> None:
    tree = PrefixTree.from_groups([(3, [2, 1]), (2, [4])])
    assert tree.lengths == (3, 2, 2, 1, 4)
    assert tree.parents == (-1, -1, 0, 0, 1)
    assert tree.starts == (0, 3, 5, 7, 8)
    assert tree.num_tokens == 12


def test_two_levels_take_two_calls() -> None:
    tree = PrefixTree.from_groups([(3, [2, 1]), (2, [4])])
    assert tree.self_call.causal and tree.self_call.query_lengths == (3, 2, 2, 1, 4)
    (cross,) = tree.ancestor_calls
    assert (cross.query_range, cross.key_range) == ((5, 12), (0, 5))
    assert (cross.query_lengths, cross.key_lengths, cross.causal) == ((3, 4), (3, 2), False)


def test_three_levels_take_one_call_per_level_and_ancestor_level() -> None:
    video_question_responses = PrefixTree([6, 2, 3, 1, 1, 2], [-1, 0, 0, 1, 1, 2])
    calls = video_question_responses.ancestor_calls
    assert [(c.query_range, c.key_range) for c in calls] == [((6, 11), (0, 6)), ((11, 15), (0, 6)), ((11, 15), (6, 11))]
    assert calls[1].query_lengths == (4,)
    assert calls[2].query_lengths == (2, 2)


def test_an_ancestor_without_descendants_keeps_an_empty_segment() -> None:
    tree = PrefixTree([3, 2, 4], [-1, -1, 1])
    (cross,) = tree.ancestor_calls
    assert cross.query_lengths == (0, 4)
    first, second = cross.cu_seqlens(torch.device("cpu"))
    assert first.tolist() == [0, 0, 4] and second.tolist() == [0, 3, 5]


def test_mask_is_ancestors_plus_causal_self() -> None:
    mask = PrefixTree([2, 1, 2], [-1, 0, 0]).mask()
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert mask.int().tolist() == expected


@pytest.mark.parametrize(
    "lengths, parents, message",
    [
        ([], [], "at least one node"),
        ([3, 2], [-1], "one parent per node"),
        ([3, 0], [-1, 0], "Node 1 has 0 tokens"),
        ([3, 2], [-1, 1], "Node 1 has parent 1"),
        ([3, 2, 2], [-1, 0, -1], "breadth first"),
        ([3, 3, 2, 2], [-1, -1, 1, 0], "breadth first"),
    ],
)
def test_other_layouts_are_refused(lengths: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixTree(lengths, parents)

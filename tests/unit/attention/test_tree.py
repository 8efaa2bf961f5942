"""PrefixTree: which tokens see which, the calls that takes, refused orders; rounding where parts of attention meet."""

from __future__ import annotations

import math

import pytest
import torch

from vlm_pg.attention import PrefixTree
from vlm_pg.attention.grouped import forward_with_lse, grouped_attention, merge_
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.attention.plan import full_plan, reading_plan


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
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
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


def test_two_results_are_merged_with_one_rounding() -> None:
    """Log-sum-exps ln 1 and ln 3: a quarter of the first and three quarters of the second, here exact in fp32."""
    out = torch.tensor([[[1.0, -2.0, 0.50390625]]], dtype=torch.bfloat16)
    other = torch.tensor([[[3.0, 2.0, 0.5]]], dtype=torch.bfloat16)
    lse = torch.zeros(1, 1)
    merge_(out, lse, other, torch.tensor([[math.log(3.0)]]))
    # 0.25 * 0.50390625 + 0.75 * 0.5 = 0.5009765625, whose neighbours in bf16 are 0.5 and 0.50390625.
    assert out.dtype == torch.bfloat16 and out.tolist() == [[[2.5, 1.0, 0.5]]]
    assert lse.item() == pytest.approx(math.log(4.0), rel=1e-6)


@pytest.mark.parametrize(
    "lengths, parents, merges_once, keys_read_once",
    [
        ([9, 4, 5], [-1, 0, 0], True, True),
        ([9, 7, 4, 5], [-1, -1, 0, 1], True, True),
        # Video, questions, responses: a response meets two levels, the video is asked by two.
        ([9, 4, 3, 2], [-1, 0, 1, 1], False, False),
    ],
)
def test_how_often_rows_meet(lengths: list[int], parents: list[int], merges_once: bool, keys_read_once: bool) -> None:
    plan = full_plan(PrefixTree(lengths, parents))
    assert (plan.merges_once, plan.keys_read_once) == (merges_once, keys_read_once)


def test_keys_of_two_levels_of_which_one_is_read() -> None:
    """Only responses ask: each meets two levels, but no level is asked twice."""
    plan = reading_plan(PrefixTree([9, 4, 3, 2], [-1, 0, 1, 1]), ["none", "none", "all", "all"])
    assert (plan.merges_once, plan.keys_read_once) == (False, True)


@pytest.mark.parametrize("levels, between", [(2, torch.bfloat16), (3, torch.float32), (4, torch.float32)])
def test_rows_of_several_levels_are_not_rounded_in_between(
    levels: int, between: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def noted(out: torch.Tensor, *others: torch.Tensor) -> None:
        found.append((out.dtype, len(out)))
        merge_(out, *others)

    monkeypatch.setattr("vlm_pg.attention.grouped.merge_", noted)
    tree = PrefixTree([6] * levels, list(range(-1, levels - 1)))
    q, k, v = (torch.randn(tree.num_tokens, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out, _ = forward_with_lse(q, k, v, full_plan(tree), 0.3, OracleKernel())
    # One merge for each level above each level, of that level's rows only.
    assert found == [(between, 6)] * (levels * (levels - 1) // 2)
    wide, _ = forward_with_lse(q.double(), k.double(), v.double(), full_plan(tree), 0.3, OracleKernel())
    # Parts and result are rounded once each: half a unit of bf16's 8 bits, of values of at most that size.
    assert out.dtype == torch.bfloat16 and (out - wide).abs().max() < 2 * 2**-9 * v.abs().max()


def test_where_few_rows_ask_gradients_of_parts_are_joined_and_none_added_to_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer: of prompts one row asks, of responses all; between them they have met every key."""
    plan = reading_plan(PrefixTree([6, 9, 4, 5], [-1, -1, 0, 1]), ["last", "last", "all", "all"])
    generator = torch.Generator().manual_seed(0)
    rows = ((plan.num_queries, 4), (plan.num_keys, 2), (plan.num_keys, 2))
    q, k, v = (torch.randn(*shape, 8, generator=generator).requires_grad_() for shape in rows)
    upstream = torch.randn(plan.num_queries, 4, 8, generator=generator)
    want = torch.autograd.grad(grouped_attention(q, k, v, plan, kernel="oracle"), (q, k, v), upstream)

    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("zeros were made for gradients that are written whole")

    monkeypatch.setattr(torch, "zeros", refused)
    out = grouped_attention(q, k, v, plan, kernel="cpu-flash")
    got = torch.autograd.grad(out, (q, k, v), upstream)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

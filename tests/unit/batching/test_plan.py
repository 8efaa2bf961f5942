"""Micro-batch plans lose nothing, keep to the budget, count what prompts share once, and keep together what shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.batching.plan import MicroBatch, Piece, Shared, plan_micro_batches, tree_tokens

RESPONSES = st.lists(st.integers(0, 20), min_size=1, max_size=9)
GROUPS = st.lists(st.tuples(st.integers(1, 40), RESPONSES), max_size=8)


def of_videos(videos: list[int], common: int) -> Shared:
    """Questions on the same video share ``common`` tokens."""
    return lambda i, j: common if videos[i] == videos[j] else 0


def largest_pass(groups: list[tuple[int, list[int]]], micro: MicroBatch, shared: Shared) -> int:
    """Most tokens that are held at one time: the prompts and the largest chunk."""
    prompts = tree_tokens([prompt for prompt, _ in groups], micro.groups, shared)
    return prompts + max(sum(groups[p.group][1][r] for p in chunk for r in p.responses) for chunk in micro.chunks)


@given(GROUPS, st.integers(60, 200), st.lists(st.integers(0, 2), min_size=8, max_size=8), st.integers(0, 1))
def test_every_response_once_and_never_over_budget(groups: list, budget: int, videos: list[int], share: int) -> None:
    shared = of_videos(videos, share * min((prompt for prompt, _ in groups), default=0))
    batches = plan_micro_batches(groups, budget, shared)
    placed = sorted((p.group, r) for micro in batches for chunk in micro.chunks for p in chunk for r in p.responses)
    assert placed == [(g, r) for g, (_, responses) in enumerate(groups) for r in range(len(responses))]
    for micro in batches:
        assert largest_pass(groups, micro, shared) <= budget
        # A chunk without a token of its own would leave weights untouched that other ranks' chunks touch.
        assert len(micro.chunks) == 1 or all(
            any(groups[p.group][1][r] for p in chunk for r in p.responses) for chunk in micro.chunks
        )
    assert sorted(g for micro in batches for g in micro.groups) == list(range(len(groups)))
    assert batches == plan_micro_batches(groups, budget, shared)


def test_groups_that_fit_stay_whole() -> None:
    assert plan_micro_batches([(10, [5, 5]), (4, [1])], 25) == [MicroBatch(((Piece(0, (0, 1)), Piece(1, (0,))),))]


def test_a_larger_group_is_chunked_behind_one_prompt() -> None:
    batches = plan_micro_batches([(10, [5, 5, 5]), (4, [1])], 21)
    assert batches == [MicroBatch(((Piece(0, (0, 1)),), (Piece(0, (2,)),))), MicroBatch(((Piece(1, (0,)),),))]
    assert [len(micro.chunks) for micro in batches] == [2, 1]


def test_questions_on_one_video_are_computed_together() -> None:
    """Budget for two questions if they share their video; without sharing every question is alone."""
    groups = [(1000, [50])] * 4
    together = plan_micro_batches(groups, 1200, of_videos([0, 1, 0, 1], common=950))
    assert [micro.groups for micro in together] == [(0, 2), (1, 3)]
    assert [micro.groups for micro in plan_micro_batches(groups, 1200)] == [(0,), (1,), (2,), (3,)]


def test_a_cluster_is_chunked_where_that_saves_more_than_its_calls_cost() -> None:
    """Two questions on a long video whose answers do not fit together: the video once and a few chunks."""
    groups = [(10_000, [500] * 10)] * 2
    (micro,) = plan_micro_batches(groups, 16_000, of_videos([0, 0], common=9_900))
    assert micro.groups == (0, 1)
    assert len(micro.chunks) == 2
    # Sharing 600 of 1,000 tokens saves less than chunking costs.
    groups = [(1000, [500] * 6)] * 2
    assert [len(m.chunks) for m in plan_micro_batches(groups, 5_000, of_videos([0, 0], common=600))] == [1, 1]


def test_a_cluster_whose_prompts_leave_no_room_is_split() -> None:
    groups = [(1000, [300])] * 3
    batches = plan_micro_batches(groups, 1300, of_videos([0, 0, 0], common=600))
    assert [micro.groups for micro in batches] == [(0,), (1,), (2,)]


def test_a_common_system_text_brings_nobody_together_but_counts() -> None:
    """Everybody shares 70 tokens; that decides nothing except how many fit."""
    batches = plan_micro_batches([(500, [100])] * 4, 2_190, lambda i, j: 70)
    assert [micro.groups for micro in batches] == [(0, 1, 2, 3)]


def test_what_cannot_fit_says_how_much_it_needs() -> None:
    with pytest.raises(ValueError, match="micro_batch_tokens to at least 30"):
        plan_micro_batches([(20, [10])], 29)


def test_tokens_of_a_tree() -> None:
    """500 common to three, 300 more common to two of them."""
    shared = [[830, 800, 500], [800, 820, 500], [500, 500, 560]]
    assert tree_tokens([830, 820, 560], [0, 1, 2], lambda i, j: shared[i][j]) == 500 + 300 + 30 + 20 + 60

"""Questions are dealt out completely, evenly, and with questions on one video side by side."""

from __future__ import annotations

import pytest

from vlm_pg.training.groups import step_order
from vlm_pg.training.questions import share_of_rank
from vlm_pg.types import MediaRef, Sample


def sample(number: int, video: str) -> Sample:
    media = (MediaRef("video", video),) if video else ()
    return Sample(str(number), "?", media, (), "A", "multiple_choice", "test", "test")


def dealt(videos: str, ranks: int, in_turn: bool = False) -> list[str]:
    samples = [sample(number, "" if video == "-" else video) for number, video in enumerate(videos)]
    shares = [share_of_rank(samples, rank, ranks, in_turn) for rank in range(ranks)]
    assert sorted(s.sample_id for share in shares for s in share) == sorted(s.sample_id for s in samples)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    return ["".join(s.media[0].path if s.media else "-" for s in share) for share in shares]


@pytest.mark.parametrize(
    "videos, shares",
    [
        ("abac", ["aa", "bc"]),
        ("abab", ["aa", "bb"]),
        ("a-b-a", ["aa", "-b-"]),
        ("aaab", ["aa", "ab"]),
        ("a", ["", "a"]),
        ("", ["", ""]),
    ],
)
def test_shares_of_two_ranks(videos: str, shares: list[str]) -> None:
    assert dealt(videos, 2) == shares


def test_one_rank_gets_everything() -> None:
    assert dealt("abcab", 1) == ["aabbc"]


def test_in_turn_every_run_of_questions_is_spread_over_all_ranks() -> None:
    assert dealt("aabbc", 2, in_turn=True) == ["abc", "ab"]
    assert dealt("ab", 3, in_turn=True) == ["a", "b", ""]


@pytest.mark.parametrize(
    "orders, numbers",
    [
        ([[0, 1, 2]], [[0, 1, 2]]),
        ([[4, 0], [2, 9]], [[2, 0], [1, 3]]),
        ([[], [7, 3], []], [[], [1, 0], []]),
        ([[0, 0], [0]], [[0, 1], [2]]),
        ([], []),
    ],
    ids=str,
)
def test_groups_are_numbered_by_their_order_whichever_rank_has_them(
    orders: list[list[int]], numbers: list[list[int]]
) -> None:
    assert step_order(orders) == numbers

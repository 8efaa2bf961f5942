"""Questions are dealt out completely, evenly, and with questions on one video side by side."""

from __future__ import annotations

import pytest

from vlm_pg.training.dealing import share_of_rank
from vlm_pg.types import MediaRef, Sample


def sample(number: int, video: str) -> Sample:
    media = (MediaRef("video", video),) if video else ()
    return Sample(str(number), "?", media, (), "A", "multiple_choice", "test", "test")


def dealt(videos: str, ranks: int) -> list[str]:
    samples = [sample(number, "" if video == "-" else video) for number, video in enumerate(videos)]
    shares = [share_of_rank(samples, rank, ranks) for rank in range(ranks)]
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

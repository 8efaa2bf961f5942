"""Questions are dealt out completely and evenly; features go where they train; ranks make the same passes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from vlm_pg.batching.cost import GroupWork
from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.models.micro_batches import Plan, Slot
from vlm_pg.training import parallel
from vlm_pg.training.groups import step_order
from vlm_pg.training.parallel import Place, _Known, _passages, agreed_slots
from vlm_pg.training.questions import share_of_rank
from vlm_pg.training.step_features import Passage
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


def known(media: str, rank: int, rows: int = 4, trained: bool = True) -> _Known:
    responses = (1, 1) if trained else ()
    work = GroupWork(20, responses, media_key=media, rank=rank)
    places = (0, 1)
    return _Known(f"{media}-{rank}", work, places if trained else (), () if trained else places, rows)


def passages(everything: list[_Known], *of_ranks: list[int]) -> list[Passage]:
    places: list[list[Place]] = [[(number, (0,)) for number in of_rank] for of_rank in of_ranks]
    return sorted(_passages(everything, places), key=str)


def test_a_group_that_leaves_takes_its_features_along() -> None:
    groups = [known("a", 0), known("b", 1, rows=7)]
    assert passages(groups, [0, 1], [0, 1]) == [Passage("a", 4, 0, 1), Passage("b", 7, 1, 0)]
    assert passages(groups, [0], [1]) == []


def test_media_that_several_ranks_have_encoded_come_from_one_or_are_there() -> None:
    groups = [known("a", 0), known("a", 1), known("b", 2)]
    assert passages(groups, [0], [1], [0, 2]) == [Passage("a", 4, 0, 2)]
    assert passages(groups, [0, 1], [], [1, 2]) == [Passage("a", 4, 0, 2)], "rank 0 has it, rank 2 gets it once"


def test_what_has_no_media_or_trains_nobody_sends_nothing() -> None:
    groups = [known("", 0, rows=0), known("a", 0, trained=False), known("a", 1)]
    assert passages(groups, [1], [0, 2]) == []
    assert passages(groups, [1, 2], [0]) == [Passage("a", 4, 1, 0)], "its own group there does not train: not encoded"


CPU = torch.device("cpu")


def micro(group: int, chunks: int) -> MicroBatch:
    return MicroBatch(tuple((Piece(group, (index,)),) for index in range(chunks)))


def test_one_rank_has_its_own_plan() -> None:
    plan = [micro(3, 4), micro(1, 2), micro(0, 1), micro(2, 1)]
    slots = agreed_slots(plan, CPU)
    assert slots == Plan(plan, 0).slots
    assert slots == [Slot(plan[0], 4), Slot(plan[1], 2), Slot(plan[2], 1), Slot(plan[3], 1)]
    assert [slot.backward_calls for slot in slots] == [5, 3, 1, 1]


def test_a_rank_fills_the_places_it_has_nothing_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has chunked micro-batches of 5 and 3 chunks and one single pass."""
    other = [{"chunked": 2.0, "plain": 1.0}, {"place 000000": 5.0, "place 000001": 3.0}]

    def with_other(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
        theirs = other.pop(0)
        assert set(values) == set(theirs), "ranks must reduce the same keys"
        return {name: max(value, theirs[name]) for name, value in values.items()}

    monkeypatch.setattr(parallel, "max_over_ranks", with_other)
    plan = [micro(2, 2), micro(0, 1), micro(1, 1)]
    assert agreed_slots(plan, CPU) == [Slot(plan[0], 5), Slot(None, 3), Slot(plan[1], 1), Slot(plan[2], 1)]


def test_no_work_anywhere() -> None:
    assert agreed_slots([], CPU) == []

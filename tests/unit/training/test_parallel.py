"""Questions are divided completely and evenly; features go where they train; ranks make the same passes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from vlm_pg.batching.cost import GroupWork
from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.models.micro_batches import Plan, Slot
from vlm_pg.training import parallel
from vlm_pg.training.groups import step_order
from vlm_pg.training.parallel import GroupPart, Parallel, _GroupInfo, _transfers
from vlm_pg.training.questions import share_of_rank
from vlm_pg.training.step_features import FeatureTransfer
from vlm_pg.types import MediaRef, Sample


def sample(number: int, video: str) -> Sample:
    media = (MediaRef("video", video),) if video else ()
    return Sample(str(number), "?", media, (), "A", "multiple_choice", "test", "test")


@pytest.mark.parametrize(
    "videos, shares",
    [
        ("abac", ["aa", "bc"]),
        ("abab", ["aa", "bb"]),
        ("a-b-a", ["aa", "-b-"]),
        ("aaab", ["aa", "ab"]),
        ("a", ["", "a"]),
        ("abcab", ["aabbc"]),
        ("aabbc, strided", ["abc", "ab"]),
        ("ab, strided", ["a", "b", ""]),
    ],
)
def test_shares_of_ranks_are_complete_and_even(videos: str, shares: list[str]) -> None:
    """Questions on one video lie on one rank, strided ones on all."""
    videos, _, strided = videos.partition(", ")
    samples = [sample(number, "" if video == "-" else video) for number, video in enumerate(videos)]
    found = [share_of_rank(samples, rank, len(shares), bool(strided)) for rank in range(len(shares))]
    assert sorted(s.sample_id for share in found for s in share) == sorted(s.sample_id for s in samples)
    assert ["".join(s.media[0].path if s.media else "-" for s in share) for share in found] == shares


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


def info(media: str, rank: int, rows: int = 4, trained: bool = True) -> _GroupInfo:
    responses, indices = (1, 1) if trained else (), (0, 1)
    work = GroupWork(20, responses, media_key=media, rank=rank)
    return _GroupInfo(f"{media}-{rank}", work, indices if trained else (), () if trained else indices, rows)


A, B, TEXT, PRUNED = info("a", 0), info("b", 1, rows=7), info("", 0, rows=0), info("a", 0, trained=False)


@pytest.mark.parametrize(
    "infos, of_ranks, transfers",
    [
        ([A, B], ([0, 1], [0, 1]), [("a", 4, 0, 1), ("b", 7, 1, 0)]),
        ([A, B], ([0], [1]), []),
        # Media that several ranks have encoded come from the first, once, or are there.
        ([A, info("a", 1), info("b", 2)], ([0], [1], [0, 2]), [("a", 4, 0, 2)]),
        ([A, info("a", 1), info("b", 2)], ([0, 1], [], [1, 2]), [("a", 4, 0, 2)]),
        # Neither text nor groups that do not train, which are not encoded, send anything.
        ([TEXT, PRUNED, info("a", 1)], ([1], [0, 2]), []),
        ([TEXT, PRUNED, info("a", 1)], ([1, 2], [0]), [("a", 4, 1, 0)]),
    ],
)
def test_features_go_where_their_groups_train(
    infos: list[_GroupInfo], of_ranks: tuple[list[int], ...], transfers: list[tuple[str, int, int, int]]
) -> None:
    parts: list[list[GroupPart]] = [[(number, (0,)) for number in of_rank] for of_rank in of_ranks]
    assert sorted(_transfers(infos, parts), key=str) == [FeatureTransfer(*transfer) for transfer in transfers]


PARALLEL = Parallel(SimpleNamespace(policy=SimpleNamespace(device=torch.device("cpu"))))  # type: ignore[arg-type]


def micro(group: int, chunks: int) -> MicroBatch:
    return MicroBatch(tuple((Piece(group, (index,)),) for index in range(chunks)))


def test_one_rank_has_its_own_plan() -> None:
    plan = [micro(3, 4), micro(1, 2), micro(0, 1), micro(2, 1)]
    slots = PARALLEL.slots(plan, plan)
    assert slots == Plan(plan, 0).slots
    assert slots == [Slot(plan[0], 4), Slot(plan[1], 2), Slot(plan[2], 1), Slot(plan[3], 1)]
    assert [slot.backward_calls for slot in slots] == [5, 3, 1, 1]


def test_a_rank_is_idle_in_slots_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has chunked micro-batches of 5 and 3 chunks and one single pass."""
    other = [{"chunked": 2.0, "plain": 1.0}, {"slot 000000": 5.0, "slot 000001": 3.0}]

    def with_other(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
        theirs = other.pop(0)
        assert set(values) == set(theirs), "ranks must reduce the same keys"
        return {name: max(value, theirs[name]) for name, value in values.items()}

    monkeypatch.setattr(parallel, "max_over_ranks", with_other)
    plan = [micro(2, 2), micro(0, 1), micro(1, 1)]
    assert PARALLEL.slots(plan, plan) == [Slot(plan[0], 5), Slot(None, 3), Slot(plan[1], 1), Slot(plan[2], 1)]
    monkeypatch.undo()
    assert PARALLEL.slots([], []) == []

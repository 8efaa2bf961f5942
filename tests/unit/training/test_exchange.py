"""Which visual features leave the rank that made them."""

from __future__ import annotations

from vlm_pg.batching.cost import GroupWork
from vlm_pg.training.parallel import Place, _Known, _passages
from vlm_pg.training.step_features import Passage


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

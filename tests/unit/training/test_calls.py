"""All ranks make the same kinds of passes in the same order, whatever each has to do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.models.micro_batches import Plan, Slot
from vlm_pg.training import parallel
from vlm_pg.training.parallel import agreed_slots

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

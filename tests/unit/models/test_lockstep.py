"""Ranks that need different modules run the same ones in the same order, and all of them finish."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.runs import ROOT
from vlm_pg.models.network import Lockstep, noop_modules
from vlm_pg.models.weights import is_sharded

PARTS = ("vision", "decoder", "head")


class Meeting:
    """Stands in for the backend: the smallest number of all ranks, or a broken meeting if one does not come."""

    def __init__(self, ranks: int):
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._numbers = [0] * ranks

    def smallest(self, rank: int, number: int) -> int:
        self._numbers[rank] = number
        self._barrier.wait()
        result = min(self._numbers)
        self._barrier.wait()
        return result


def run_ranks(wanted: list[list[str]]) -> list[list[tuple[str, bool]]]:
    """Modules that each rank ran, and whether it needed them."""
    meeting = Meeting(len(wanted))
    ran: list[list[tuple[str, bool]]] = [[] for _ in wanted]

    def rank(index: int) -> None:
        def idle(part: str) -> Callable[[], None]:
            return lambda: ran[index].append((part, False))

        lockstep = Lockstep({part: idle(part) for part in PARTS}, torch.device("cpu"))
        lockstep._agree = lambda number: meeting.smallest(index, number)  # type: ignore[method-assign]
        for part in wanted[index]:
            lockstep.run(part, lambda part=part: ran[index].append((part, True)))
        lockstep.finish()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return ran


@pytest.mark.parametrize(
    "wanted",
    [
        [["decoder", "head"], ["vision", "decoder", "head", "decoder", "head", "decoder", "head"]],
        [[], ["vision", "vision", "decoder", "head"]],
        [["vision", "decoder", "head"] * 5, ["decoder", "head"] * 2, ["head"]],
        [[], []],
    ],
)
def test_all_run_the_same_modules_and_each_those_it_needs(wanted: list[list[str]]) -> None:
    ran = run_ranks(wanted)
    orders = [[part for part, _ in of_rank] for of_rank in ran]
    assert all(order == orders[0] for order in orders)
    for of_rank, own_order in zip(ran, wanted, strict=True):
        assert [part for part, own in of_rank if own] == own_order


def test_a_rank_that_fails_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    monkeypatch.setattr(Lockstep, "finish", lambda self: pytest.fail("it waited for the others before it raised"))

    def fail() -> None:
        with policy.independent_ranks(scattered=True):
            assert policy.lockstep is not None
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert policy.lockstep is None


def test_only_weights_py_reads_the_mark_of_sharded_weights() -> None:
    weights = torch.nn.Linear(2, 2)
    assert not is_sharded(weights)
    weights.bias.ds_id = 0  # type: ignore[attr-defined]
    assert is_sharded(torch.nn.Sequential(weights))
    files = [path for path in (ROOT / "vlm_pg").rglob("*.py") if "ds_id" in path.read_text()]
    assert files == [ROOT / "vlm_pg" / "models" / "weights.py"]


@torch.no_grad()
def test_noop_modules_run() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen2"):
        for part in noop_modules(tiny_policy(family=family)).values():
            assert part().isfinite().all()  # type: ignore[attr-defined]

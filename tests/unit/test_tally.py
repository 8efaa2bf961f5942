"""Metrics of many parts: added up on the device, read once, and put together over ranks and updates as declared."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from vlm_pg.metrics import Chart, Metric
from vlm_pg.tally import Tally, over_updates

SUM = Metric("tokens", "tokens", "sum")
MEAN = Metric("entropy", "nat")
LARGEST = Metric("ratio_max", how="largest")
SMALLEST = Metric("ratio_min", how="smallest")
NO_VALUE = Metric("reward", of_nothing=None)


def test_a_metric_is_its_name_and_carries_the_rest() -> None:
    family = Metric("seconds/", "s", "same", Chart("Seconds", 7))
    one = pickle.loads(pickle.dumps(family.of("train")))
    assert one == "seconds/train" and {one: 1} == {"seconds/train": 1}
    assert (one.unit, one.how, one.chart, one.over_updates) == ("s", "same", Chart("Seconds", 7), "mean")


def test_numbers_and_tensors_add_up_and_extremes_are_kept() -> None:
    tally = Tally()
    tally.add(SUM, 5)
    tally.add(SUM, 7)
    tally.add_all({MEAN: torch.tensor(0.5), NO_VALUE: 3}, 4)
    tally.add_all({MEAN: torch.tensor(-0.25), NO_VALUE: 0}, 1)
    for value in (1.5, 3.0, 2.0):
        tally.add_all({LARGEST: torch.tensor(value), SMALLEST: value})
    assert tally.total(SUM) == 12.0
    assert tally.reduced() == {"tokens": 12.0, "entropy": 0.05, "reward": 0.6, "ratio_max": 3.0, "ratio_min": 1.5}


def test_a_mean_of_nothing_is_what_its_metric_says_and_what_nobody_adds_is_not_there() -> None:
    tally = Tally()
    tally.add_all({MEAN: 0, NO_VALUE: 0}, 0)
    assert tally.reduced() == {"entropy": 0.0, "reward": None} and Tally().reduced() == {}


def test_sums_of_many_parts_keep_what_fp32_would_lose() -> None:
    tally = Tally()
    for value in (2.0**25, 1.0, 1.0):
        tally.add(SUM, torch.tensor(value))
    assert tally.reduced() == {SUM: 2.0**25 + 2}


def test_a_loss_of_minus_zero_is_zero() -> None:
    tally = Tally()
    tally.add(SUM, torch.tensor(-0.0))
    assert str(tally.reduced()[SUM]) == "0.0"


def test_adding_does_not_read_the_device() -> None:
    """A tensor without data cannot be read, so whoever looks at one before the end fails here."""
    tally = Tally()
    for _ in range(2):
        tally.add_all(dict.fromkeys((SUM, MEAN, LARGEST, SMALLEST), torch.zeros((), device="meta")), 3)


@pytest.mark.parametrize(
    ("how", "over", "expected"),
    [("sum", None, 9.0), ("mean", None, 3.0), ("largest", None, 5.0), ("smallest", None, 1.0), ("same", None, 3.0)]
    + [("sum", "mean", 3.0), ("same", "sum", 9.0)],
)
def test_updates_of_a_step(how: str, over: str | None, expected: float) -> None:
    metric = Metric("x", "", how, over_updates=over)  # type: ignore[arg-type]
    assert over_updates([{metric: 5.0}, {}, {metric: 1.0}, {metric: 3.0}]) == {"x": expected}


def _rank(number: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    tally = Tally()
    for micro_batch in range(2 + number):
        value = torch.tensor(0.5 + number + micro_batch)
        tally.add_all({SUM: value, MEAN: value, LARGEST: value, SMALLEST: value}, weight=1 + number)
    if number:  # known on one rank alone
        tally.add(Metric("reward/other"), 3.0, 2)
    torch.save(dict(tally.reduced()), f"{folder}/{number}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_what_both_have_added(tmp_path: Path) -> None:
    start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    total = (0.5 + 1.5) + (1.5 + 2.5 + 3.5)
    expected = {"tokens": total, "entropy": total / 8, "ratio_max": 3.5, "ratio_min": 0.5, "reward/other": 1.5}
    assert [torch.load(tmp_path / f"{number}.pt", weights_only=False) for number in range(2)] == [expected, expected]

"""Sums over micro-batches: added up on the device, read once, and right over ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from vlm_pg.distributed import max_over_ranks, sum_over_ranks
from vlm_pg.training.passes import StepSums

CPU = torch.device("cpu")


def test_numbers_and_tensors_add_up_and_the_largest_is_kept() -> None:
    sums = StepSums()
    sums.add(tokens_computed=5, loss=torch.tensor(0.5))
    sums.add(tokens_computed=7, loss=torch.tensor(-0.25), kl=torch.tensor(2.0))
    for value in (1.5, 3.0, 2.0):
        sums.keep_largest(ratio_max=torch.tensor(value))
    assert sums.read() == ({"tokens_computed": 12, "loss": 0.25, "kl": 2.0}, {"ratio_max": 3.0})


def test_nothing_summed() -> None:
    assert StepSums().read() == ({}, {})


def test_sums_of_many_micro_batches_keep_what_fp32_would_lose() -> None:
    sums = StepSums()
    for value in (2.0**25, 1.0, 1.0):
        sums.add(ratio_sum=torch.tensor(value))
    assert sums.read()[0]["ratio_sum"] == 2.0**25 + 2


def test_adding_does_not_read_the_device() -> None:
    """A tensor without data cannot be read, so whoever looks at one before the end fails here."""
    sums = StepSums()
    for _ in range(2):
        sums.add(loss=torch.zeros((), device="meta"), tokens=3.0)
        sums.keep_largest(ratio_max=torch.zeros((), device="meta"))


def _rank(number: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    sums = StepSums()
    for micro_batch in range(2 + number):
        sums.add(mismatch_tokens=4, mismatch_kl=torch.tensor(0.5 + number + micro_batch))
        sums.keep_largest(mismatch_abs_max=torch.tensor(1.0 + number - micro_batch))
    totals, largest = sums.read()
    result = sum_over_ranks(totals, CPU) | max_over_ranks(largest, CPU)
    torch.save(result, f"{folder}/{number}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_sum_of_both_and_the_larger_maximum(tmp_path: Path) -> None:
    start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    expected = {"mismatch_tokens": 20.0, "mismatch_kl": (0.5 + 1.5) + (1.5 + 2.5 + 3.5), "mismatch_abs_max": 2.0}
    assert [torch.load(tmp_path / f"{number}.pt") for number in range(2)] == [expected, expected]

"""Peak memory that is counted, beside the one that a process of its own is seen to take."""

from __future__ import annotations

import os

import pytest

from tests.support.processor import HAS_AVX512
from vlm_pg.bench.process import run_worker
from vlm_pg.bench.step import CONTESTANTS, OURS, StepRun


@pytest.mark.skipif(not HAS_AVX512, reason="other kernels put other amounts of memory aside, which no count knows")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((OURS, "transformers-batch"), id="some"),
        pytest.param(tuple(CONTESTANTS), marks=pytest.mark.matrix, id="all"),
    ],
)
def test_counted_peaks_are_those_that_are_measured(asked: tuple[str, ...]) -> None:
    """Contestants of ``bench step`` at a small point, as the command measures and counts it."""
    names = [name for name in asked if CONTESTANTS[name].unavailable_because() is None]
    spec = {"model": "small", "dtype": "fp32", "device": "cpu", "checkpointing": False, "threads": 1, "memory": True}
    spec |= {"repeats": 0, "prefix": 768, "generations": 4, "response": 96, "lengths": [96] * 4}
    runs = {name: CONTESTANTS[name].run for name in names}
    measured = run_worker(spec | {"case": StepRun.case, "counted": StepRun.counted, "contestants": runs}, 3600)
    assert measured["failed"] == {}
    ratios = {
        name: entry["counted"]["peak_bytes"] / entry["peak_bytes"] for name, entry in measured["contestants"].items()
    }
    assert set(ratios) == set(names)
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}, ratios

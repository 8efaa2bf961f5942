"""Peak memory and times that are counted, beside those that were measured."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.processor import HAS_AVX512
from vlm_pg.bench.grid import RolloutPoint, StepPoint
from vlm_pg.bench.process import run_worker
from vlm_pg.bench.rollout import RolloutRun
from vlm_pg.bench.runner import PointsRun
from vlm_pg.bench.step import StepRun

STEP = (StepRun, StepPoint(768, 4, 96))
# Of a rollout the first run of larger operands than a warm-up's touches 2 to 3 MiB of libraries: prompts long enough.
ROLLOUT = (RolloutRun, RolloutPoint(1792, 2, 4, 2))


@pytest.mark.skipif(not HAS_AVX512, reason="other kernels put other amounts of memory aside, which no count knows")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
@pytest.mark.parametrize(
    "bench,point,some",
    [
        pytest.param(*STEP, ("grouped", "transformers-batch"), id="step"),
        pytest.param(*ROLLOUT, ("ours", "transformers-generate"), id="rollout"),
        pytest.param(*STEP, None, marks=pytest.mark.matrix, id="step-all"),
        pytest.param(*ROLLOUT, None, marks=pytest.mark.matrix, id="rollout-all"),
    ],
)
def test_counted_peaks_are_those_that_are_measured(
    bench: type[PointsRun[Any]], point: Any, some: tuple[str, ...] | None
) -> None:
    """Contestants at a small point, as the command measures and counts them."""
    asked = some or tuple(bench.contestants_known)
    names = [name for name in asked if bench.contestants_known[name].unavailable_because() is None]
    spec = {"model": "small", "dtype": "fp32", "device": "cpu", "checkpointing": False, "threads": 1, "memory": True}
    spec |= {"repeats": 0, **point.record}
    runs = {name: bench.contestants_known[name].run for name in names}
    measured = run_worker(spec | {"case": bench.case, "counted": bench.counted, "contestants": runs}, 3600)
    assert measured["failed"] == {}
    ratios = {
        name: entry["counted"]["peak_bytes"] / entry["peak_bytes"] for name, entry in measured["contestants"].items()
    }
    assert set(ratios) == set(names)
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}, ratios


def test_expected_seconds_are_those_that_were_measured() -> None:
    """Updates of a 7B model on an H100, counted anew: at the least, and within 15 % as expected."""
    folder = Path(__file__).parents[4] / "docs" / "benchmarks"
    figures = json.loads((folder / "2026-11-28-h100.json").read_text())["figures"]
    seconds = runpy.run_path(str(folder / "count_beside.py"))["seconds"]
    updates = [one for one in figures if (one["figure"], one["point"]) == ("update", "4096,8,512")]
    assert len(updates) == 3
    for figure in updates:
        least, expected = seconds(figure)
        assert least < figure["seconds"] < 2 * least, figure
        assert abs(expected / figure["seconds"] - 1) < 0.15, (figure, expected)

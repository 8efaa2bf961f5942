"""Whole runs under the torch engine on two processes: the weights of one process, from checkpoints of either."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.layouts import distance
from tests.support.processes import launch_ranks
from tests.support.runs import read_lines
from tests.support.short_run import train_here
from tests.support.small_run import clips_run


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.matrix)])
def test_two_processes_train_what_one_trains_and_each_resumes_from_the_other(dtype: str, tmp_path: Path) -> None:
    """Bf16's forward may turn a near tie in sampling: there only that the run goes on is compared."""
    config = clips_run(tmp_path, run={"resume": "auto"}, model={"dtype": dtype})
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    assert train_here(config, f"run.dir={alone}").code == 0
    on_two = ("vlm_pg.cli", "train", str(config), f"run.dir={mixed}")
    printed = launch_ranks(*on_two, "training.steps=1")
    assert "2 process(es), engine torch (all weights on every rank)" in printed
    assert "resuming after step 1" in train_here(config, f"run.dir={mixed}", "training.steps=2").printed
    assert "resuming after step 2" in launch_ranks(*on_two)
    assert [line["step"] for line in read_lines(mixed / "metrics.jsonl")] == [1, 2, 3]
    expected, found = (load_file(run / "checkpoints/step-000003/model.safetensors") for run in (alone, mixed))
    if dtype == "fp32":
        assert max(distance(found, expected).values()) <= 1e-5

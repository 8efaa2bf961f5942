"""``vlm-pg bench step`` from the command line: a ragged point, then the file is resumed.

With two contestants, and as a matrix with every one; tests/unit/bench has them all in one process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_pg.bench.step import CONTESTANTS, OURS
from vlm_pg.cli import main

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((OURS, "transformers-batch"), id="some"),
        pytest.param(tuple(CONTESTANTS), marks=pytest.mark.matrix, id="all"),
    ],
)
def test_measure_then_resume(asked: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    common = ["bench", "step", "--ragged", "--repeats", "2", "--threads", "1", "--device", "cpu", "--out", str(out)]
    common += ["--contestants", *asked]
    assert main([*common, "--points", "48,3,8"]) == 0

    result = json.loads(out.read_text())
    (point,) = result["points"]
    assert list(point["contestants"]) == list(asked) and not point["failed"] and not result["skipped"]
    for entry in point["contestants"].values():
        assert len(entry["seconds"]) == 2 and min(entry["seconds"]) > 0
        assert entry["peak_bytes"] > 0 and "child process" in entry["peak_method"]
        assert entry["loss"] == pytest.approx(point["contestants"]["grouped"]["loss"], rel=1e-4)
    assert point["contestants"]["transformers-batch"]["grouped_gain"]["bounds"]["tokens"] > 2
    assert result["machine"]["packages"]["torch"] and result["commands"][0].startswith("vlm-pg bench step")
    printed = capfd.readouterr().out
    assert "timed run 2 of 2" in printed and "of the FLOP bound" in printed

    # The measured point stays.
    assert main([*common, "--points", "48,3,8", "40,2,6", "--resume"]) == 0
    again = json.loads(out.read_text())
    assert again["points"][0] == point and again["points"][1]["prefix"] == 40 and len(again["commands"]) == 2
    assert "1 of 2 points are in" in capfd.readouterr().out

    assert main([*common, "--points", "40,2,6"]) == 2
    assert "--resume" in capfd.readouterr().err

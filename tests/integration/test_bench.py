"""``vlm-pg bench step`` from the command line: a ragged point, then the file is resumed.

With one contestant of each kind, and as a matrix with every one; tests/unit/bench has them all in one process.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from vlm_pg.bench.step import CONTESTANTS, OURS
from vlm_pg.cli import main


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((OURS, "transformers-batch", "prefix-grouper-kind"), id="some"),
        pytest.param(tuple(CONTESTANTS), marks=pytest.mark.matrix, id="all"),
    ],
)
def test_measure_then_resume(asked: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, figure = tmp_path / "step.json", tmp_path / "step.svg"
    common = ["bench", "step", "--ragged", "--repeats", "2", "--threads", "1", "--device", "cpu", "--out", str(out)]
    common += ["--contestants", *asked]
    assert main([*common, "--points", "48,3,8", "--figure", str(figure)]) == 0

    result = json.loads(out.read_text())
    (point,) = result["points"]
    expected = [name for name in asked if find_spec("prefix_grouper") or not name.startswith("prefix-grouper")]
    assert list(point["contestants"]) == expected and not point["failed"]
    assert {entry["contestant"] for entry in result["skipped"]} == set(asked) - set(expected)
    for entry in point["contestants"].values():
        assert len(entry["seconds"]) == 2 and min(entry["seconds"]) > 0
        assert entry["peak_bytes"] > 0 and "child process" in entry["peak_method"]
        assert entry["loss"] == pytest.approx(point["contestants"]["grouped"]["loss"], rel=1e-4)
    assert point["contestants"]["transformers-batch"]["grouped_gain"]["bounds"]["tokens"] > 2
    assert result["machine"]["packages"]["torch"] and result["commands"][0].startswith("vlm-pg bench step")
    printed = capfd.readouterr().out
    assert "timed run 2 of 2" in printed and "of the FLOP bound" in printed
    assert "<svg" in figure.read_text()

    # A budget of nothing: the measured point stays, the new one is named with its reason.
    assert main([*common, "--points", "48,3,8", "40,2,6", "--resume", "--budget-minutes", "0.0001"]) == 0
    again = json.loads(out.read_text())
    assert again["points"] == result["points"] and len(again["commands"]) == 2
    left_out = [entry for entry in again["skipped"] if "budget" in entry["reason"]]
    assert {(entry["prefix"], entry["contestant"]) for entry in left_out} == {(40, name) for name in expected}
    printed = capfd.readouterr().out
    assert "1 of 2 points are in" in printed and "left out (" in printed and "40,2,6" in printed

    assert main([*common, "--points", "40,2,6"]) == 2
    assert "--resume" in capfd.readouterr().err

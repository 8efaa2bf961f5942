"""``vlm-pg bench`` from the command line, memory included; then the file is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.bench.step import CONTESTANTS, OURS
from vlm_pg.cli import main


def measured_and_resumed(
    out: Path, capfd: pytest.CaptureFixture[str], point: str, other: str, *options: str
) -> tuple[dict[str, Any], str]:
    """The file after one point, which stays when another one is added; and what was printed for it."""
    common = ["bench", *options, "--threads", "1", "--device", "cpu", "--out", str(out)]
    assert main([*common, "--points", point]) == 0
    result, printed = json.loads(out.read_text()), capfd.readouterr().out
    assert result["measurement"] == options[0] and result["commands"][0].startswith(f"vlm-pg bench {options[0]}")
    assert main([*common, "--points", point, other, "--resume", "--no-memory"]) == 0
    again = json.loads(out.read_text())
    assert again["points"][0] == result["points"][0] and len(again["commands"]) == 2
    assert again["points"][1]["prefix"] == int(other.split(",")[0])
    assert "1 of 2 points are in" in capfd.readouterr().out
    assert main([*common, "--points", other]) == 2
    assert "--resume" in capfd.readouterr().err
    return result, printed


@pytest.mark.matrix
def test_rollouts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("rollout", "--repeats", "1", "--contestants", "ours", "transformers-generate")
    result, printed = measured_and_resumed(tmp_path / "rollout.json", capfd, "256,4,3", "40,2,4", *options)
    (point,) = result["points"]
    assert (point["prefix"], point["generations"], point["new_tokens"], point["groups"]) == (256, 4, 3, 1)
    ours, generate = (point["contestants"][name] for name in ("ours", "transformers-generate"))
    assert generate["equal_tokens"] == 1.0 and "child process" in ours["peak_method"]
    assert 0 < ours["peak_bytes"] < generate["peak_bytes"]
    assert generate["prefill_tokens"] == 4 * ours["prefill_tokens"] == 4 * 256
    assert "timed run 1 of 1" in printed and "tok/s, first after" in printed


@pytest.mark.matrix
@pytest.mark.parametrize("names", [(OURS, "transformers-batch"), tuple(CONTESTANTS)], ids=["some", "all"])
def test_ragged_steps(names: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("step", "--ragged", "--repeats", "2", "--contestants", *names)
    result, printed = measured_and_resumed(tmp_path / "step.json", capfd, "48,3,8", "40,2,6", *options)
    (point,) = result["points"]
    assert list(point["contestants"]) == list(names) and not point["failed"] and not result["skipped"]
    for entry in point["contestants"].values():
        assert len(entry["seconds"]) == 2 and min(entry["seconds"]) > 0
        assert entry["peak_bytes"] > 0 and "child process" in entry["peak_method"]
        assert entry["loss"] == pytest.approx(point["contestants"]["grouped"]["loss"], rel=1e-4)
    assert point["contestants"]["transformers-batch"]["grouped_gain"]["bounds"]["tokens"] > 2
    assert result["machine"]["packages"]["torch"]
    assert "timed run 2 of 2" in printed and "of the FLOP ratio" in printed

"""``vlm-pg bench rollout`` from the command line: two points, memory included; then the file is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.counted import counted_lines
from vlm_pg.bench.grid import RolloutPoint
from vlm_pg.bench.rollout import CONTESTANTS, OURS, RolloutRun
from vlm_pg.bench.worker import measure
from vlm_pg.cli import main


def test_measure_then_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, figure = tmp_path / "rollout.json", tmp_path / "rollout.svg"
    contestants = ["--contestants", "ours", "transformers-generate"]
    common = ["bench", "rollout", "--repeats", "1", "--threads", "1", "--device", "cpu", *contestants]
    common += ["--out", str(out)]
    assert main([*common, "--points", "256,4,3", "--figure", str(figure)]) == 0

    result = json.loads(out.read_text())
    (point,) = result["points"]
    assert result["measurement"] == "rollout" and result["commands"][0].startswith("vlm-pg bench rollout")
    assert (point["prefix"], point["generations"], point["new_tokens"], point["groups"]) == (256, 4, 3, 1)
    ours, generate = (point["contestants"][name] for name in ("ours", "transformers-generate"))
    assert generate["equal_tokens"] == 1.0 and "child process" in ours["peak_method"]
    assert 0 < ours["peak_bytes"] < generate["peak_bytes"]
    assert generate["prefill_tokens"] == 4 * ours["prefill_tokens"] == 4 * 256
    times = generate["ours_gain"]["counted"]
    assert times["flops"] == generate["counted"]["flops"] / ours["counted"]["flops"] > 1
    printed = capfd.readouterr().out
    assert "timed run 1 of 1" in printed and "tok/s, first after" in printed
    assert f"counted: {ours['counted']['peak_bytes'] / 2**30:.3f} GiB (" in printed
    assert f"; ours has {times['flops']:.2f}x fewer FLOPs" in printed
    assert "<svg" in figure.read_text() and "counted FLOPs; peak memory" in figure.read_text()

    # A budget of nothing: the measured point stays, the new one is named with its reason.
    assert main([*common, "--points", "256,4,3", "40,2,4,2", "--resume", "--budget-minutes", "0.0001"]) == 0
    again = json.loads(out.read_text())
    assert again["points"] == result["points"] and len(again["commands"]) == 2
    assert {entry["contestant"] for entry in again["skipped"]} == {"ours", "transformers-generate"}
    assert all("budget" in entry["reason"] and entry["groups"] == 2 for entry in again["skipped"])
    printed = capfd.readouterr().out
    assert "1 of 2 points are in" in printed and "40,2,4,2" in printed


def refuse(spec: Any, name: str, run: Any) -> None:
    raise CannotRun(f"{name} has a reason")


def break_down(spec: Any, name: str, run: Any) -> None:
    raise NotImplementedError("no such operator\nfor these tensors")


@pytest.mark.parametrize(
    "count, reason",
    [("refuse", "ours has a reason"), ("break_down", "NotImplementedError on fake tensors: no such operator")],
)
def test_who_cannot_be_counted_is_measured_all_the_same(count: str, reason: str) -> None:
    spec = {"model": "small", "dtype": "fp32", "device": "cpu", "threads": 1, "memory": False, "repeats": 1}
    spec |= {**RolloutPoint(16, 2, 3).record, "case": RolloutRun.case, "contestants": {OURS: CONTESTANTS[OURS].run}}
    entry = measure(spec | {"counted": f"tests.unit.bench.test_rollout_command:{count}"})["contestants"][OURS]
    assert entry["not_counted"] == reason and "counted" not in entry and len(entry["seconds"]) == 1


def test_what_was_not_counted_is_said() -> None:
    assert counted_lines({"not_counted": "a reason"}, None, "ours") == ["    not counted: a reason"]
    assert counted_lines({}, None, "ours") == []

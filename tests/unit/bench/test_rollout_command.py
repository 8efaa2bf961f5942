"""``vlm-pg bench rollout`` from the command line: two points, memory included; then the file is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_pg.cli import main


def test_measure_then_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rollout.json"
    contestants = ["--contestants", "ours", "transformers-generate"]
    common = ["bench", "rollout", "--repeats", "1", "--threads", "1", "--device", "cpu", *contestants]
    common += ["--out", str(out)]
    assert main([*common, "--points", "256,4,3"]) == 0

    result = json.loads(out.read_text())
    (point,) = result["points"]
    assert result["measurement"] == "rollout" and result["commands"][0].startswith("vlm-pg bench rollout")
    assert (point["prefix"], point["generations"], point["new_tokens"], point["groups"]) == (256, 4, 3, 1)
    ours, generate = (point["contestants"][name] for name in ("ours", "transformers-generate"))
    assert generate["equal_tokens"] == 1.0 and "child process" in ours["peak_method"]
    assert 0 < ours["peak_bytes"] < generate["peak_bytes"]
    assert generate["prefill_tokens"] == 4 * ours["prefill_tokens"] == 4 * 256
    printed = capfd.readouterr().out
    assert "timed run 1 of 1" in printed and "tok/s, first after" in printed

    # The measured point stays; of one group, one after the other is no contestant.
    assert main([*common, "--points", "256,4,3", "40,2,4", "--resume"]) == 0
    again = json.loads(out.read_text())
    assert again["points"][0] == point and again["points"][1]["prefix"] == 40 and len(again["commands"]) == 2
    assert "1 of 2 points are in" in capfd.readouterr().out

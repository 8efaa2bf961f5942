"""``scripts/gpu_check.sh`` on a CPU, as it is started: real stages, one JSON, one page; the GPU's are left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = ["bash", "scripts/gpu_check.sh", "--device", "cpu"]
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *arguments], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def stages_of(folder: Path) -> dict[str, Any]:
    return {stage["name"]: stage for stage in json.loads((folder / "result.json").read_text())["stages"]}


@pytest.mark.matrix
def test_the_environment_alone(tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    done = start("--out", str(out), "--minutes", "30", "--only", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    result, stages = json.loads((out / "result.json").read_text()), stages_of(out)
    assert result["device"] == "cpu" and result["machine"]["packages"]["torch"]
    assert {name: stage["status"] for name, stage in stages.items()} == {"environment": "ok", "tests": "left out"}
    assert "no GPU here" in (out / "report.html").read_text()


@pytest.mark.matrix
def test_a_run_and_its_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Thirty minutes, so that a machine that is busy with others does not matter; the stages take seconds.
    done = start("--out", str(out), "--minutes", "30", "--only", "step-small")
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = stages_of(out)["step-small"]["figures"]["points"]
    assert {"grouped", "transformers-batch"} <= set(point["contestants"])
    page = (out / "report.html").read_text()
    assert "transformers-batch" in page
    assert "http:" not in page and "https:" not in page and "<script" not in page

    again = start("--out", str(out), "--only", "step-small")
    assert again.returncode == 2 and "--resume" in again.stderr
    again = start("--out", str(out), "--only", "step-small", "--resume")
    assert again.returncode == 0 and "step-small: was done before" in again.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_check_that_is_stopped_ends_its_stage_and_writes_its_page(tmp_path: Path, number: signal.Signals) -> None:
    command = [*SCRIPT, "--out", str(tmp_path / "out"), "--only", "environment"]
    # Where the tests run in the background of a shell, SIGINT is ignored, and a process begun there inherits that.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, usual)
    with process:
        log = tmp_path / "out/environment.log"
        while not log.is_file() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, printed = process.communicate()
    assert process.returncode == 130 and "stopped" in printed
    assert (tmp_path / "out/report.html").is_file()


@pytest.mark.matrix
def test_everything_that_needs_no_gpu(tmp_path: Path) -> None:
    done = start("--out", str(tmp_path / "out"), "--minutes", "60")
    assert done.returncode == 0, done.stdout
    stages = stages_of(tmp_path / "out")
    left_out = {name for name, stage in stages.items() if stage["status"] == "left out"}
    assert left_out == {"tests", "training-bf16"}
    training = stages["training-fp32"]["figures"]
    assert [step["step"] for step in training["steps"]] == [1, 2, 3, 4]
    assert all(step["grad_norm"] > 0 for step in training["steps"])
    assert set(training["accuracy_after"]) == {"seen_orders", "unseen_orders"}
    assert "seen_orders" in (tmp_path / "out/report.html").read_text()
    beside = stages["counted"]["figures"]["beside"]
    assert [row["measurement"] for row in beside] == ["step"] * 3 + ["rollout"] * 2
    assert all(row["measured"]["seconds"] > 0 for row in beside)
    uncounted = {row["contestant"] for row in beside if "not_counted" in row}
    assert uncounted == {"transformers-generate"}, "its steps are only measured"
    assert all(row["counted"]["launches"] > 0 for row in beside if row["contestant"] not in uncounted)

"""The timeline of real runs: two ranks that wait for each other, a run that is killed and resumed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ModuleProcess, launch_ranks
from tests.support.short_run import short_run, train_here
from vlm_pg.observe.report.page import write_report

pytestmark = pytest.mark.matrix

# However late rank 0 is: of as many responses rank 1's are checked a moment later.
SLOW_ON_RANK_1 = """import os, time
from pathlib import Path
checked = [Path(__file__).with_name(f"checked-by-{rank}") for rank in (0, 1)]
def spread(response, question):
    own = checked[int(os.environ["RANK"])]
    with own.open("ab") as file:
        file.write(b".")
    if own is checked[1]:
        give_up = time.monotonic() + 60
        while checked[0].stat().st_size < own.stat().st_size and time.monotonic() < give_up:
            time.sleep(0.005)
        time.sleep(0.5)
    return sum(map(ord, response)) % 7 / 7
"""
EVERY_STEP = {"prompts", "vision", "rollout", "rewards", "train", "logs", "checkpoint", "step"}


def slices_of(run: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads((run / "trace.json").read_bytes()) if event["ph"] == "X"]


def steps_of(slices: Sequence[dict[str, Any]], rank: int = 0) -> list[int]:
    return [event["args"]["step"] for event in slices if event["name"] == "step" and event["pid"] == rank]


def test_waiting_for_the_other_rank_is_in_the_time_line(tmp_path: Path) -> None:
    """Rank 1 is slow in checking: rank 0's wait lasts until it is done. Both ranks' slices lie in one file."""
    config = short_run(tmp_path)
    (tmp_path / "spread.py").write_text(SLOW_ON_RANK_1)
    (tmp_path / "checked-by-0").touch()
    launch_ranks("vlm_pg.cli", "train", str(config), "observe.report=true")
    slices = slices_of(tmp_path / "run")
    for rank in (0, 1):
        assert steps_of(slices, rank) == [1, 2, 3]
        for step in (1, 2, 3):
            of_step = [event for event in slices if event["pid"] == rank and event["args"].get("step") == step]
            assert EVERY_STEP | {"idle"} == {event["name"] for event in of_step}
            whole = next(event for event in of_step if event["name"] == "step")
            assert all(
                whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"]
                for event in of_step
            )
    for step in (1, 2, 3):
        of_step = [event for event in slices if event["args"].get("step") == step]
        (rewards,) = (event for event in of_step if event["pid"] == 1 and event["name"] == "rewards")
        waits = [event for event in of_step if event["pid"] == 0 and event["name"] == "idle"]
        # Between sampling and the update, at the update's end, at the step's end. A clock's tick is allowed.
        assert len(waits) == 3 and waits[0]["dur"] > 0
        checked = rewards["ts"] + rewards["dur"]
        assert waits[0]["ts"] < checked <= waits[0]["ts"] + waits[0]["dur"] + 20_000
    html = (tmp_path / "run" / "report.html").read_text()
    assert "rank 1 (" in html and "waiting for other ranks" in html


def test_the_timeline_of_a_killed_run_is_continued(tmp_path: Path) -> None:
    config = short_run(tmp_path)
    run, trace = tmp_path / "run", tmp_path / "run" / "trace.json"
    process = ModuleProcess("vlm_pg.cli", "train", str(config), "training.steps=500", "training.checkpoint_every=2")
    while not trace.exists() or len(steps_of(slices_of(run))) < 4:
        assert process.returncode is None, process.printed
        time.sleep(0.005)
    process.signal(signal.SIGKILL)
    process.finish()
    before = slices_of(run)
    assert write_report(run).exists()
    done = train_here(config, f"training.steps={max(steps_of(before)) + 2}")
    assert done.code == 0
    after = slices_of(run)
    assert after[: len(before)] == before
    further = steps_of(after[len(before) :])
    assert further == list(range(further[0], max(steps_of(before)) + 3))

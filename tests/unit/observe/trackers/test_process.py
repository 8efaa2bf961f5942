"""A tracker's process may refuse, hang, die or be stopped: the trainer is told, and never waits for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.unit.observe.builders import make_group, read_lines
from vlm_pg.observe.metrics import MetricsLog
from vlm_pg.observe.rollouts import RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.settings import ObserveSettings
from vlm_pg.observe.trackers import process as process_module
from vlm_pg.observe.trackers.kinds import KINDS, Kind
from vlm_pg.observe.trackers.process import TrackerProcess
from vlm_pg.observe.trackers.trackers import Trackers

PATIENCE_SECONDS = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", resume=False)


@pytest.fixture
def fed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a class of tests.support.sinks stand for wandb."""
    return lambda sink: monkeypatch.setitem(KINDS, "wandb", Kind("sys", "wandb", f"tests.support.sinks:{sink}"))


class Run:
    """A run of a few steps with one tracker; what it said is kept."""

    def __init__(self, folder: RunFolder, resume_step: int | None = None, **settings: Any):
        settings = {"trackers": ("wandb",), "tracker_seconds": PATIENCE_SECONDS} | settings
        self.folder, self.infos, self.warnings = folder, list[str](), list[str]()
        self.metrics, self.rollouts = MetricsLog(folder, resume_step), RolloutsLog(folder, resume_step=resume_step)
        observe = ObserveSettings(**settings)
        self.trackers = Trackers(observe, folder, "tiny", resume_step, self.infos.append, self.warnings.append)

    @property
    def process(self) -> TrackerProcess:
        return self.trackers._processes[0]

    def log(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.metrics.write(step, {"reward": step / 8})
            self.rollouts.write(step, [make_group(frames=0)])
            self.trackers.step_done(step)

    def wait_for(self, *steps: int) -> None:
        """Until the tracker was given these."""
        until(lambda: set(steps) <= set(taken(self.folder)))

    def close(self, failed: bool = False) -> None:
        self.trackers.close(failed)
        self.metrics.close()
        self.rollouts.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def noted(folder: RunFolder, key: str) -> list[Any]:
    path = folder.path / "sink.jsonl"
    return [line[key] for line in read_lines(path) if key in line] if path.exists() else []


def taken(folder: RunFolder) -> list[int]:
    return noted(folder, "step")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_everything_arrives_in_order_and_what_it_prints_goes_into_its_log(
    folder: RunFolder, fed_by: Callable[[str], None]
) -> None:
    fed_by("Chatty")
    folder.write_config("run: {name: tiny}\n")
    run = Run(folder, track_rollouts_every=2, project="mine")
    run.log(1, 4)
    run.close()
    assert taken(folder) == [1, 2, 3, 4]
    assert noted(folder, "scalars") == [{"train/reward": step / 8} for step in range(1, 5)]
    assert [len(rows) for rows in noted(folder, "rows")] == [2, 2, 0, 2]
    assert (noted(folder, "begin"), noted(folder, "project")) == (["tiny"], ["mine"])
    assert noted(folder, "config") == [{"run.name": "tiny"}] and noted(folder, "failed") == [False]
    assert run.infos[-1] == "wandb: at sink.jsonl" and run.warnings == []
    log = (folder.trackers / "wandb.log").read_text()
    assert "printed by the tracker" in log and "complained by the tracker" in log


def test_a_resumed_run_goes_on_where_the_tracker_is(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    fed_by("Recording")
    run = Run(folder)
    run.log(1, 5)
    run.close(failed=True)
    run = Run(folder, resume_step=3)
    run.log(4, 7)
    run.close()
    assert taken(folder) == [1, 2, 3, 4, 5, 6, 7] and noted(folder, "run_id") == [None, "fresh"]
    assert noted(folder, "failed") == [True, False]
    assert "wandb has the steps up to 5 already: those from 4 on are not sent again" in run.infos


def test_what_an_earlier_start_did_not_send_is_sent_after_a_resume(
    folder: RunFolder, fed_by: Callable[[str], None]
) -> None:
    fed_by("Hanging")
    run = Run(folder, tracker_seconds=0)
    run.log(1, 4)
    run.wait_for(2)
    run.close()
    assert taken(folder) == [1, 2]
    fed_by("Recording")
    run = Run(folder, resume_step=4)
    run.close()  # without a further step
    assert taken(folder) == [1, 2, 3, 4]


def test_one_that_refuses_costs_one_warning_and_a_count(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    fed_by("Raising")
    run = Run(folder)
    run.log(1, 4)
    run.close()
    first, last = run.warnings
    assert first == (
        "observe.trackers: wandb failed in step 1 (ConnectionError: no route to host,\\nstep 1). The run goes on; "
        f"metrics.jsonl has everything. ({folder.trackers / 'wandb.log'} has more.)"
    )
    assert "wandb did not take 4 of the steps 1 to 4, or not in full. metrics.jsonl has them." in last
    assert "tests/support/sinks.py" in (folder.trackers / "wandb.log").read_text()
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2, 3, 4]


def test_one_that_never_begins_costs_two_lines(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    fed_by("NeverBegins")
    run = Run(folder)
    run.log(1, 3)
    run.close()
    assert (
        len(run.warnings) == 2 and "wandb could not begin (PermissionError: no API key configured)" in run.warnings[0]
    )
    assert "wandb could not begin while the run lasted" in run.warnings[1]


def test_one_that_hangs_is_told_of_and_ended_with_the_run(
    folder: RunFolder, fed_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed_by("Hanging")
    run = Run(folder, tracker_seconds=0)
    pid = run.process.pid
    run.log(1, 3)
    run.wait_for(2)
    assert run.warnings == []
    monkeypatch.setattr(process_module, "STALL_SECONDS", 0.0)
    run.log(4, 6)
    stalled = r"wandb has taken nothing for \d+ s and is at step 1\. The run goes on; metrics.jsonl has everything\."
    assert len(run.warnings) == 1 and re.search(stalled, run.warnings[0])
    run.close()
    assert "wandb was still sending and was ended (the end of a run waits observe.tracker_seconds)" in run.warnings[1]
    assert "It was given the steps up to 1 of 6; metrics.jsonl has them all" in run.warnings[1] and gone(pid)


def test_one_that_dies_costs_one_warning(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    fed_by("Dying")
    run = Run(folder)
    run.log(1, 1)
    until(lambda: gone(run.process.pid))
    (child,) = noted(folder, "child")
    assert not gone(child)
    run.log(2, 4)
    run.close()
    until(lambda: gone(child))
    assert len(run.warnings) == 1 and "wandb's process has ended (exit code 3) at step 0" in run.warnings[0]


def test_one_that_cannot_be_started_costs_one_line(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    fed_by("Recording")
    folder.trackers.write_text("a file in the place of the folder")
    run = Run(folder)
    run.log(1, 2)
    run.close()
    assert run.warnings == [
        "observe.trackers: wandb's process could not be started (FileExistsError: [Errno 17] File exists: "
        f"'{folder.trackers}'). The run goes on; metrics.jsonl has everything."
    ]


def test_what_packages_print_when_they_are_imported_is_no_answer(
    folder: RunFolder, fed_by: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed_by("Recording")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('Welcome!\\n[1]\\n{broken', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    run = Run(folder)
    run.log(1, 2)
    run.close()
    assert taken(folder) == [1, 2] and run.warnings == []


def test_steps_that_could_not_be_handed_over_are_told_of_and_sent_after_a_resume(
    folder: RunFolder, fed_by: Callable[[str], None], tmp_path: Path
) -> None:
    """Where it is kept how far a tracker has come cannot be written for a while."""
    fed_by("Recording")
    run = Run(folder)
    run.log(1, 1)
    run.wait_for(1)
    folder.trackers.rename(tmp_path / "aside")
    run.log(2, 3)
    run.close()
    assert taken(folder) == [1] and len(run.warnings) == 2
    assert "wandb cannot be supplied from the run's files (FileNotFoundError" in run.warnings[0]
    assert (
        "wandb has not everything. It was given the steps up to 1 of 3; metrics.jsonl has them all" in run.warnings[1]
    )
    (tmp_path / "aside").rename(folder.trackers)
    run = Run(folder, resume_step=3)
    run.close()
    assert taken(folder) == [1, 2, 3] and run.warnings == []


def test_steps_of_another_runs_checkpoint_are_not_waited_for(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    """Its metrics are in that run's folder."""
    fed_by("Recording")
    run = Run(folder, resume_step=50)
    run.close()
    assert taken(folder) == [] and run.warnings == []


def test_who_interrupts_a_run_does_not_wait_for_its_trackers(
    folder: RunFolder, fed_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed_by("Hanging")
    waited: list[float] = []
    wait = TrackerProcess.wait

    def end(process: TrackerProcess, seconds: float) -> None:
        waited.append(seconds)
        wait(process, 0.0)

    monkeypatch.setattr(TrackerProcess, "wait", end)
    for error in (KeyboardInterrupt, ValueError):
        run = Run(folder)
        pid = run.process.pid
        run.log(1, 2)
        with pytest.raises(error), run.trackers:
            raise error
        assert gone(pid)
    assert waited[0] == 0.0 and waited[1] > 0.0


def test_one_that_reads_nothing_never_holds_the_trainer_up(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    """Far more than a pipe holds; a trainer that waited would wait for ever."""
    fed_by("Recording")
    run = Run(folder, tracker_seconds=0)
    run.log(1, 1)
    run.wait_for(1)
    os.kill(run.process.pid, signal.SIGSTOP)
    for step in range(2, 20_000):
        run.process.step_done(step)
    pid = run.process.pid
    run.close()
    assert gone(pid)


def test_signals_to_the_whole_job_end_no_tracker(folder: RunFolder, fed_by: Callable[[str], None]) -> None:
    fed_by("Recording")
    run = Run(folder)
    run.log(1, 1)
    run.wait_for(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(run.process.pid, number)
    run.log(2, 3)
    run.close()
    assert taken(folder) == [1, 2, 3] and noted(folder, "failed") == [False] and run.warnings == []


def test_a_tracker_ends_with_its_trainer(folder: RunFolder) -> None:
    """In whatever call it hangs."""
    trainer = (
        "import sys, time; from pathlib import Path; from vlm_pg.observe.metrics import MetricsLog\n"
        "from vlm_pg.observe.run_folder import RunFolder; from vlm_pg.observe.settings import ObserveSettings\n"
        "from vlm_pg.observe.trackers.kinds import KINDS, Kind; from vlm_pg.observe.trackers.trackers import Trackers\n"
        "KINDS['wandb'] = Kind('sys', 'wandb', 'tests.support.sinks:Hanging')\n"
        "folder = RunFolder(Path(sys.argv[1])); log = MetricsLog(folder)\n"
        "trackers = Trackers(ObserveSettings(trackers=('wandb',)), folder, 'tiny')\n"
        "log.write(1, {}); log.write(2, {}); trackers.step_done(2); time.sleep(1000)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", trainer, str(folder.path)], cwd=ROOT)
    until(lambda: taken(folder) == [1, 2])
    (pid,) = noted(folder, "pid")
    started.kill()
    started.wait()
    until(lambda: gone(pid))

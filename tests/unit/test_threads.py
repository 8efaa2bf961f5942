"""Threads: how many torch gets, and the warning when other programs keep the cores busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlm_pg import threads


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cores_that_a_container_allows(files: dict[str, str], expected: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.allowed_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("wanted", "allowed", "environment", "expected"),
    [
        (None, 1.5, None, 1),
        (None, 0.5, None, 1),
        (None, 2.0, None, 2),
        (None, 64.0, None, 3),
        (None, None, None, 3),
        (None, 1.0, "3", 3),
        (2, 1.0, None, 2),
    ],
)
def test_torch_gets_no_more_threads_than_may_run(
    wanted: int | None, allowed: float | None, environment: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(3)
    monkeypatch.setattr(threads, "allowed_cores", lambda: allowed)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    threads.use_threads(wanted)
    assert torch.get_num_threads() == expected


_SHARES_A_CORE = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from vlm_pg.threads import CoreWatch
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
time.sleep(0.5)
watch = CoreWatch()
while time.thread_time() < 0.6: pass
print(watch.waiting_share())
for other in others: other.kill(); other.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not report waits for a core")
def test_a_process_that_shares_its_core_waits() -> None:
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-c", _SHARES_A_CORE], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert float(found.stdout) > threads.WAITING_SHARE, found.stderr


def test_what_is_said() -> None:
    message = threads.waiting_warning(0.62, 2)
    assert message is not None and "core 62 % of its time" in message and "torch's 2 threads" in message
    assert "Set training.torch_threads to 1" in message
    assert threads.waiting_warning(0.2, 2) is None
    assert threads.waiting_warning(0.9, 1) is None, "nothing can be done"
    assert threads.waiting_warning(None, 2) is None


def test_nothing_is_said_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    assert threads.CoreWatch().waiting_share() is None

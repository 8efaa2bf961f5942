"""A rank gets SIGTERM once the launcher that started it was killed, and by no other parent's end."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from vlm_pg.cli import main
from vlm_pg.watch import launcher
from vlm_pg.watch.launcher import watch_launcher

# Starts the first of its arguments as a program with the others, and ends with its standard input. Its name looks like
# the fields that follow it in /proc/PID/stat; it does not hold the pipe that the rank prints to.
PARENT = """
import os, subprocess, sys

open("/proc/self/comm", "w").write("a) S 1 1")
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
os.close(1)
sys.stdin.read()
"""
RANK = """
import os, signal
from vlm_pg.watch import launcher

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
launcher.CHECK_SECONDS = 0.01
launcher.watch_launcher()
print(os.getppid(), flush=True)
print(signal.sigtimedwait([signal.SIGTERM], 60) is not None, flush=True)
"""
LAUNCHERS = {"torchrun": ("TORCHELASTIC_RUN_ID", 1), "deepspeed": ("CROSS_RANK", 2)}


def launched(name: str, local_rank: int = 0) -> subprocess.Popen[str]:
    """The first of the processes between the user and a rank."""
    variable, generations = LAUNCHERS[name]
    return subprocess.Popen(
        [sys.executable, "-c", *[PARENT] * generations, RANK],
        env=os.environ | {"PYTHONPATH": str(ROOT), variable: "1", "LOCAL_RANK": str(local_rank)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    "name, is_first, local_rank", [("torchrun", True, 0), ("deepspeed", True, 1), ("deepspeed", False, 0)]
)
def test_a_rank_stops_when_its_launcher_was_killed(name: str, is_first: bool, local_rank: int) -> None:
    """``is_first``: it is the command that the user started, not what DeepSpeed's starts on a node."""
    with launched(name, local_rank) as first:
        assert first.stdout is not None
        parent = int(first.stdout.readline())
        assert (parent == first.pid) is (name == "torchrun")
        killed = first.pid if is_first else parent
        os.kill(killed, signal.SIGKILL)
        assert first.stdout.readline() == "True\n"
        first.kill()
        printed = first.communicate()[1]
    if local_rank:
        assert not printed
    else:
        assert f"vlm-pg: warning: {name} (host {socket.gethostname()}, process {killed}) has ended without" in printed


def test_a_rank_stops_whose_stderr_was_a_pipe_to_its_launcher() -> None:
    with launched("torchrun") as first:
        assert first.stdout is not None and first.stderr is not None
        first.stdout.readline()
        first.stderr.close()
        first.kill()
        assert first.stdout.readline() == "True\n"


def test_a_shell_that_torchrun_was_started_from_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched are torchrun alone, and of DeepSpeed's two what the system shows."""
    watched: queue.Queue[tuple[str, list[int]]] = queue.Queue()
    monkeypatch.setattr(launcher, "_watch", lambda *arguments: watched.put(arguments))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    watch_launcher()
    assert watched.get() == ("torchrun", [os.getppid()])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("CROSS_RANK", "1")
    monkeypatch.setattr(launcher, "Path", lambda _: Path("absent"))
    watch_launcher()
    assert watched.get() == ("deepspeed", [os.getppid()])


def test_every_command_watches_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("vlm_pg.watch.launcher.watch_launcher", lambda: calls.append(True))
    assert main(["report", "absent"]) == 2 and calls


def test_a_process_that_no_launcher_started_watches_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup, setsid, a container: the variables that name a rank may be set by hand, too."""
    for variable in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(variable, "1")
    watch_launcher()
    assert "launcher watch" not in {thread.name for thread in threading.enumerate()}

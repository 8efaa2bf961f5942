"""A command that hangs ends with all that it has started, and one that ends leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from scripts.bench.gpu_check.run import run_limited

# Starts a child in a session of its own and one in its own group, names both, and sleeps.
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, start_new_session=True), subprocess.Popen(sleep)]
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children))
print("both run", flush=True)
time.sleep(float(sys.argv[2]))
"""


def run(tmp_path: Path, code: str, *arguments: str, limit: float = 60.0) -> tuple[int | None, str]:
    log = tmp_path / "log"
    ended = run_limited([sys.executable, "-c", code, *arguments], log, limit, os.environ, tmp_path)
    return ended.code, log.read_text()


def is_gone(pid: int) -> bool:
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # dead, and nobody has asked for its code
            return True
        time.sleep(0.05)
    return False


def test_exit_codes_signals_and_output(tmp_path: Path) -> None:
    code = "print('to the log'); import sys; print('this too', file=sys.stderr); sys.exit(3)"
    assert run(tmp_path, code) == (3, "to the log\nthis too\n")
    assert run(tmp_path, "import os; os.kill(os.getpid(), 11)")[0] == -11
    with pytest.raises(OSError, match="no-such-program"):
        run_limited(["no-such-program"], tmp_path / "log", 5, os.environ, tmp_path)


def test_a_hanging_command_ends_with_its_children_and_those_of_other_sessions(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code, log = run(tmp_path, PARENT, str(pids), "600", limit=3.0)
    assert code is None and log == "both run\n"
    assert [is_gone(int(pid)) for pid in pids.read_text().split()] == [True, True]


@pytest.mark.matrix
def test_a_command_that_ignores_sigterm_ends(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    assert run(tmp_path, deaf, limit=2.0) == (None, "deaf\n")


def test_what_an_ended_command_left_in_its_group_goes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert run(tmp_path, PARENT, str(pids), "0")[0] == 0
    apart, beside = map(int, pids.read_text().split())
    assert is_gone(beside)
    os.kill(apart, 9)  # a daemon of its own session, left by a command that ended well: nobody's to end

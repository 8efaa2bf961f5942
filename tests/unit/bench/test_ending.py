"""What ``vlm-pg bench`` starts ends with it, also where SIGTERM or SIGKILL ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PATIENCE_SECONDS = 300.0
# What stands in for a measurement: it says who it is, and never ends.
WORKER = """
from vlm_pg.bench.process import run_worker
spec = {"case": "tests.unit.bench.test_ending:Hanging", "contestants": {}, "device": "any", "memory": False}
run_worker(spec | {"threads": 1, "file": sys.argv[1]}, 3600)
"""
CHILDREN = """
from tests.unit.bench.test_ending import hang
from vlm_pg.bench.paper.children import in_children
list(in_children(hang, [sys.argv[1]], 1))
"""


def hang(path: str) -> None:
    written = Path(f"{path}.part")
    written.write_text(str(os.getpid()))
    written.rename(path)
    time.sleep(3600)


class Hanging:
    @staticmethod
    def build(spec: dict[str, Any]) -> None:
        hang(spec["file"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("code", [WORKER, CHILDREN], ids=["worker", "children"])
def test_they_end_with_whoever_started_them(code: str, number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    command = [sys.executable, "-c", f"import sys\n{code}", str(path)]
    with subprocess.Popen(command) as process:
        try:
            _wait(lambda: path.exists() or process.poll() is not None)
            pid = int(path.read_text())
            assert _lives(pid)
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == -number
        finally:
            process.kill()
    _wait(lambda: not _lives(pid))


def _wait(done: Any) -> None:
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < PATIENCE_SECONDS, "it never came to that"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        # One that has ended may be a zombie for as long as nobody asks for it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

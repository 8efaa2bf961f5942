"""The measure of peak memory reacts to a known allocation, also to one that was given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_alive

# In a process of its own: the test process has threads and memory of earlier tests.
_PROGRAM = """
from vlm_pg.bench.runner import CannotRun
from vlm_pg.bench.memory import give_freed_memory_back, in_child, peak_above_baseline

def refuse():
    raise CannotRun("not with this model")

def allocate(mib):
    block = bytearray(mib * 2**20)
    block[::4096] = b"x" * (len(block) // 4096)
    del block
    return mib

def measure(mib):
    give_freed_memory_back()
    allocate(200)  # a higher peak before: it must not be seen
    return peak_above_baseline(lambda: allocate(mib))

for mib in (1, 64):
    result, peak = in_child(lambda: measure(mib))
    assert result == mib
    print(peak.num_bytes / 2**20, peak.method)
import os, signal
for fault in (lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGKILL), refuse):
    try:
        in_child(fault)
    except (CannotRun, RuntimeError) as failure:
        print(type(failure).__name__, str(failure).splitlines()[-1])
"""


def test_known_allocations_are_found() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak cannot be reset here")
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    small, large, raised, killed, refused = done.stdout.splitlines()
    assert "clear_refs" in small and "clear_refs" in large
    assert float(small.split()[0]) < 4
    assert float(large.split()[0]) == pytest.approx(64, abs=3)
    assert raised == "RuntimeError ZeroDivisionError: division by zero"
    assert killed.startswith("CannotRun memory run failed: killed by SIGKILL (what")
    assert refused == "CannotRun not with this model"


PATIENCE_SECONDS = 300.0
# What stands in for a measurement: it says who it is, and never ends.
WORKER = """
from vlm_pg.bench.memory import in_child
from vlm_pg.bench.runner import run_worker
if sys.argv[2] == "in_child":
    from tests.unit.bench.test_memory import hang
    in_child(lambda: hang(sys.argv[1]))
spec = {"case": "tests.unit.bench.test_memory:Hanging", "contestants": {}, "device": "any", "memory": False}
run_worker(spec | {"threads": 1, "file": sys.argv[1]}, 3600)
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


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("in_child", signal.SIGKILL),
        ("worker", signal.SIGKILL),
        pytest.param("worker", signal.SIGTERM, marks=pytest.mark.matrix),
    ],
)
def test_a_child_or_worker_ends_with_the_process_that_started_it(
    kind: str, number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    command = [sys.executable, "-c", f"import sys\n{WORKER}", str(path), kind]
    with subprocess.Popen(command) as process:
        try:
            _wait(lambda: path.exists() or process.poll() is not None)
            pid = int(path.read_text())
            assert is_alive(pid)
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == -number
        finally:
            process.kill()
    _wait(lambda: not is_alive(pid))


def _wait(done: Any) -> None:
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < PATIENCE_SECONDS, "it never came to that"
        time.sleep(0.05)

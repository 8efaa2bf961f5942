"""The measure of peak memory reacts to a known allocation, also to one that was given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# In a process of its own: the test process has threads and memory of earlier tests.
_PROGRAM = """
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.memory import give_freed_memory_back, in_child, peak_above_baseline

def refuse():
    raise CannotRun("not with this model")

def allocate(mib):
    kept = bytearray(mib * 2**20)
    kept[::4096] = b"x" * (len(kept) // 4096)
    del kept
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


_FORKS = """
import os, time
from vlm_pg.bench.memory import in_child

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(60)

in_child(sleep)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere who starts the process ends its group")
def test_a_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _FORKS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    try:
        parent.communicate(timeout=20)  # the end of a pipe that the child holds too
    except subprocess.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child went on")

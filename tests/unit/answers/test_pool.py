"""What checking processes promise beyond what all pools do (tests/unit/killable)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.killable.helpers import is_gone, others_in_group, wait_until_gone
from vlm_pg.answers.pool import Call, CheckerPool
from vlm_pg.rewards.settings import CheckerSettings


@pytest.fixture(scope="module")
def pool() -> Iterator[CheckerPool]:
    pool = CheckerPool(CheckerSettings(workers=2, timeout_seconds=3.0, memory_mb=256))
    yield pool
    pool.close()


def test_deep_recursion_is_a_result(pool: CheckerPool):
    nested: list = []
    for _ in range(900):
        nested = [nested]
    [outcome, after] = pool.run([Call("copy:deepcopy", (nested,)), Call("operator:add", (2, 2))])
    assert "RecursionError" in outcome.problem
    assert after.value == 4


def test_a_task_that_cannot_even_be_read_is_lost_once():
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=30.0, memory_mb=256))
    lost, after = pool.run([Call("builtins:len", ("x" * (150 << 20),)), Call("operator:add", (1, 1))])
    assert "its process ended by itself" in lost.problem
    assert after.value == 2
    pool.close()


def test_a_program_that_a_task_starts_can_be_ended(pool: CheckerPool):
    """What a worker lets go by, it does not inherit."""
    [outcome] = pool.run([Call("subprocess:call", (["sh", "-c", "kill -TERM $$; exit 3"],))])
    assert outcome.value == -signal.SIGTERM


def test_a_process_that_ran_out_of_memory_is_replaced():
    """What filled its memory may still be held."""
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=30.0, memory_mb=256))
    pool.run([Call("operator:add", (1, 1))])
    pids = pool.pids
    assert "out of memory" in pool.run([Call("builtins:bytearray", (1 << 30,))])[0].problem
    assert pool.pids != pids and is_gone(pids[0])
    assert pool.run([Call("operator:add", (1, 1))])[0].value == 2
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads from /proc what a process started")
@pytest.mark.parametrize("end", ["deadline", "close", "stopped"])
def test_what_a_task_starts_ends_with_its_process(end: str):
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=3.0 if end == "deadline" else 60.0))
    pool.run([Call("os:getpid")])
    [pid] = pool.pids
    started: list[int] = []
    if end == "close":
        pool.run([Call("os:system", ("sleep 600 &",))])
        started = others_in_group(pid)
    else:

        def look() -> bool:
            started[:] = others_in_group(pid) or started
            return end == "stopped" and bool(started)

        try:
            [outcome] = pool.run([Call("subprocess:call", (["sleep", "600"],))], look)
            assert "deadline" in outcome.problem
        except InterruptedError:
            assert end == "stopped"
    pool.close()
    assert started and wait_until_gone([pid, *started])


def test_a_program_that_a_task_starts_does_not_hold_its_connection(tmp_path: Path):
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=30.0))
    pool.run([Call("os:getpid")])
    [pid] = pool.pids
    # os.system closes no descriptors by itself.
    assert pool.run([Call("os:system", (f"ls -l /proc/self/fd > {tmp_path}/open",))])[0].value == 0
    listed = (tmp_path / "open").read_text()
    assert "/dev/null" in listed and "socket:" not in listed
    assert pool.pids == [pid]
    pool.close()


def test_what_workers_print_goes_nowhere(pool: CheckerPool, capfd: pytest.CaptureFixture[str]):
    assert pool.run([Call("builtins:print", ("hello",))])[0].problem == ""
    assert capfd.readouterr() == ("", "")


def test_lone_surrogates_and_null_characters_travel(pool: CheckerPool):
    assert pool.run([Call("builtins:str", ("\ud800\x00é",))])[0].value == "\ud800\x00é"


def test_a_missing_memory_limit_is_warned_of_once(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    pool = CheckerPool(CheckerSettings(workers=1), warn=shown.append)
    pool.run([Call("os:getpid")])
    assert shown == []
    pool._pool.workers[0].limited = False
    pool.run([Call("os:getpid")])
    pool.run([Call("os:getpid")])
    assert len(shown) == 1 and "memory_mb cannot be enforced" in shown[0]
    pool.close()

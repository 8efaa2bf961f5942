"""Checking processes can be killed: deadline, memory and crashes cost one task, the pool keeps its size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vlm_pg.rewards.pool import Call, CheckerPool
from vlm_pg.rewards.settings import CheckerSettings


@pytest.fixture(scope="module")
def pool() -> Iterator[CheckerPool]:
    pool = CheckerPool(CheckerSettings(workers=2, timeout_seconds=3.0, memory_mb=256))
    yield pool
    pool.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until_gone(pids: list[int]) -> bool:
    for _ in range(600):
        if all(is_gone(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_one_task_that_is_lost_costs_no_other(pool: CheckerPool):
    calls = [
        Call("operator:add", (1, 2)),
        Call("time:sleep", (60,)),
        Call("os:_exit", (3,)),
        Call("signal:raise_signal", (signal.SIGKILL,)),
        Call("builtins:bytearray", (1 << 30,)),
        Call("builtins:int", ("x",)),
        Call("sys:exit", (1,)),
        Call("operator:pow", (9, 9)),
    ]
    outcomes = pool.run(calls)
    assert outcomes[0].value == 3 and outcomes[0].problem == "" and outcomes[0].seconds is not None
    assert outcomes[1].problem == "deadline: it took longer than 3 s and was stopped"
    assert outcomes[2].problem == "its process ended by itself (exit code 3)"
    assert outcomes[3].problem == "its process ended by itself (signal SIGKILL)"
    assert outcomes[4].problem == "out of memory: it needs more than reward.checker.memory_mb"
    assert "ValueError: invalid literal for int" in outcomes[5].problem and "Traceback" in outcomes[5].trace
    assert outcomes[6].problem == "SystemExit: 1"
    assert outcomes[7].value == 9**9
    assert len(pool.pids) == 2 and not any(map(is_gone, pool.pids)), "lost processes are replaced"


def test_c_code_that_holds_the_interpreter_is_stopped(pool: CheckerPool):
    """The processes' own threads cannot run then: the parent has to stop it."""
    [outcome] = pool.run([Call("builtins:pow", (9, 9**9))])
    assert "deadline" in outcome.problem or "memory" in outcome.problem


def test_a_process_that_its_own_alarm_ended_took_too_long(pool: CheckerPool):
    """On a busy machine its parent may notice the end before it notices the deadline."""
    [outcome] = pool.run([Call("signal:raise_signal", (14,))])
    assert "deadline" in outcome.problem


def test_deep_recursion_is_a_result(pool: CheckerPool):
    nested: list = []
    for _ in range(900):
        nested = [nested]
    [outcome, after] = pool.run([Call("copy:deepcopy", (nested,)), Call("operator:add", (2, 2))])
    assert "RecursionError" in outcome.problem
    assert after.value == 4


def test_a_process_killed_while_idle_is_replaced_and_costs_no_task(pool: CheckerPool):
    pool.run([Call("operator:add", (1, 1))] * 4)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pool.pids)
    assert [outcome.value for outcome in pool.run([Call("operator:add", (1, 1))] * 4)] == [2] * 4


def test_a_process_that_is_just_ending_costs_no_task(pool: CheckerPool, monkeypatch: pytest.MonkeyPatch):
    """For a moment it neither has an exit status nor has hung up: a task can still be written to it."""
    pool.run([Call("operator:add", (1, 1))] * 4)
    first = pool._workers[0]
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)  # takes what is sent, and never reads it
    sent = Connection.send_bytes

    def send_and_end(connection: Connection, message: bytes) -> None:
        sent(connection, message)
        if connection is dying:
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)

    dying = first._connection
    monkeypatch.setattr(Connection, "send_bytes", send_and_end)
    assert pool.run([Call("operator:add", (1, 1))])[0].value == 2
    for pid in pool.pids:
        os.kill(pid, signal.SIGCONT)


def test_a_task_that_cannot_even_be_read_is_lost_once():
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=30.0, memory_mb=256))
    lost, after = pool.run([Call("builtins:len", ("x" * (150 << 20),)), Call("operator:add", (1, 1))])
    assert "its process ended by itself" in lost.problem
    assert after.value == 2
    pool.close()


def test_the_end_of_a_job_is_the_parents_to_handle(pool: CheckerPool):
    """Launchers send SIGTERM, or a terminal SIGHUP, to all processes: a step that goes on must keep its checkers."""
    pool.run([Call("operator:add", (1, 1))] * 4)
    pids = pool.pids
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        for pid in pids:
            os.kill(pid, number)
    assert [outcome.value for outcome in pool.run([Call("operator:add", (1, 1))] * 4)] == [2] * 4
    assert pool.pids == pids
    [outcome] = pool.run([Call("subprocess:call", (["sh", "-c", "kill -TERM $$; exit 3"],))])
    assert outcome.value == -signal.SIGTERM, "a program that a task starts can be ended"


def test_a_process_that_ran_out_of_memory_is_replaced():
    """What filled its memory may still be held."""
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=30.0, memory_mb=256))
    pool.run([Call("operator:add", (1, 1))])
    pids = pool.pids
    assert "out of memory" in pool.run([Call("builtins:bytearray", (1 << 30,))])[0].problem
    assert pool.pids != pids and is_gone(pids[0])
    assert pool.run([Call("operator:add", (1, 1))])[0].value == 2
    pool.close()


def others_in_group(pid: int) -> list[int]:
    """Processes of the group that ``pid`` leads, itself left out."""
    others = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if stat.read_text().rsplit(")", 1)[1].split()[2] == str(pid) != stat.parent.name:
                others.append(int(stat.parent.name))
    return others


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


def test_no_process_before_the_first_task_and_none_after_close():
    pool = CheckerPool(CheckerSettings(workers=1))
    assert pool.pids == []
    pool.run([])
    assert pool.pids == []
    pool.run([Call("os:getpid")])
    [pid] = pool.pids
    pool.close()
    pool.close()
    assert is_gone(pid) and pool.pids == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.run([Call("os:getpid")])


def test_processes_that_do_not_start_are_an_error_with_the_reason():
    pool = CheckerPool(CheckerSettings(workers=1), [Call("no_such_module:function")])
    with pytest.raises(RuntimeError, match=r"do not start \(3 tries(?s:.*)No module named 'no_such_module'"):
        pool.run([Call("os:getpid")])
    pool.close()


def test_a_missing_memory_limit_is_said_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    pool = CheckerPool(CheckerSettings(workers=1), warn=said.append)
    pool.run([Call("os:getpid")])
    assert said == []
    pool._workers[0].limited = False
    pool.run([Call("os:getpid")])
    pool.run([Call("os:getpid")])
    assert len(said) == 1 and "memory_mb cannot be enforced" in said[0]
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads which processes a process started from /proc")
def test_workers_end_with_their_parent_and_what_they_started_too():
    code = """
        import os
        from vlm_pg.rewards.pool import Call, CheckerPool
        from vlm_pg.rewards.settings import CheckerSettings
        pool = CheckerPool(CheckerSettings(workers=2, timeout_seconds=60.0))
        pool.run([Call("os:getpid")] * 2)
        pids = pool.pids
        started = []
        def look():
            for pid in pids:
                with open(f"/proc/{pid}/task/{pid}/children") as file:
                    started.extend(file.read().split())
            if len(set(started)) >= 2:
                print(*pids, *set(started), flush=True)
                os._exit(0)
        pool.run([Call("subprocess:call", (["sleep", "600"],))] * 2, look)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 4, done.stderr
    assert wait_until_gone(pids)

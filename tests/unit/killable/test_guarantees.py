"""Processes can be killed: deadlines, crashes, memory and the parent's death cost one task, never the run.

Every test runs over both kinds of pools; what only one of them promises is tested beside it.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tests.support.kept_templates import KeptTemplates
from tests.unit.killable.helpers import KINDS, AnyPool, is_gone, wait_until_gone
from vlm_pg.answers.pool import Call, CheckerPool
from vlm_pg.killable.template import Template
from vlm_pg.media.pool import WorkerPool
from vlm_pg.rewards.settings import CheckerSettings

TWO = ("operator:add", 1, 1)
PID = ("os:getpid",)


@pytest.fixture(scope="module", params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[AnyPool]:
    with AnyPool(request.param, deadline_seconds=3.0) as pool:
        yield pool


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_one_task_that_is_lost_costs_no_other(pool: AnyPool):
    """In order, and no answer is another's: tasks behind an overdue, an exiting and a killed one get their own."""
    before, slow, exits, between, killed, after = pool.run(
        PID, ("time:sleep", 60), ("os:_exit", 3), PID, ("signal:raise_signal", signal.SIGKILL), PID
    )
    assert len({os.getpid(), before, between, after}) == 4, "each loss was followed by a new worker"
    assert is_gone(before) and is_gone(between) and pool.pool.pids == [after]
    expected = {
        True: ("'time:sleep' took longer than 3 s and was given up. Files must decode within media.deadline_seconds. "
               "Raise it, re-encode", "crashed on 'os:_exit': exit code 3. Files that", "': signal SIGKILL. Files"),
        False: ("deadline: it took longer than 3 s and was stopped", "its process ended by itself (exit code 3)",
                "its process ended by itself (signal SIGKILL)"),
    }[pool.decodes]  # fmt: skip
    for lost, part in zip((slow, exits, killed), expected, strict=True):
        assert part in str(lost)
    if pool.decodes:
        assert [lost.reason for lost in (slow, exits, killed)] == ["decode_timeout"] + ["decoder_crashed"] * 2


def test_c_code_that_holds_the_interpreter_is_stopped(pool: AnyPool):
    """The processes' own threads cannot run then: the parent has to stop it."""
    lost, after = pool.run(("builtins:pow", 9, 9**9), TWO)
    assert "took longer than 3 s" in str(lost) or "memory" in str(lost)
    assert after == 2


def test_a_worker_that_its_own_alarm_ended_took_too_long(pool: AnyPool):
    """On a busy machine its parent may notice the end before it notices the deadline."""
    [lost] = pool.run(("signal:raise_signal", signal.SIGALRM))
    assert "took longer than 3 s" in str(lost)


def test_memory_beyond_the_limit_costs_one_task(pool: AnyPool):
    lost, after = pool.run(("builtins:bytearray", 1 << 30), TWO)
    words = "What media.worker_memory_bytes allows is expected to do. Raise it, or lower media.max_frames"
    assert (words if pool.decodes else "out of memory: it needs more than reward.checker.memory_mb") in str(lost)
    assert after == 2


def test_the_end_of_a_job_is_the_parents_to_handle(pool: AnyPool):
    """Launchers send SIGTERM, or a terminal SIGHUP, to all processes: a step that goes on must keep its workers."""
    [pid] = pool.run(PID)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(pid, number)
    assert pool.run(PID, ("os:getenv", "OMP_NUM_THREADS")) == [pid, "1"]


def test_a_worker_killed_while_it_is_idle_costs_no_task(pool: AnyPool):
    [pid] = pool.run(PID)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid])
    assert pool.run(TWO, TWO) == [2, 2]


def test_a_worker_that_is_just_ending_costs_no_task(pool: AnyPool, monkeypatch: pytest.MonkeyPatch):
    """For a moment it neither has an exit status nor has hung up: a task can still be written to it."""
    [pid] = pool.run(PID)
    os.kill(pid, signal.SIGSTOP)  # takes what is sent, and never reads it
    dying, sent = pool.inner.workers[0].connection, Connection.send_bytes

    def send_and_end(connection: Connection, message: bytes) -> None:
        sent(connection, message)
        if connection is dying:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(Connection, "send_bytes", send_and_end)
    assert pool.run(TWO) == [2]


@pytest.mark.parametrize("length", [1, pytest.param(1 << 20, marks=pytest.mark.matrix)])
def test_a_worker_that_takes_nothing_is_given_up_and_its_task_begun_by_another(pool: AnyPool, length: int):
    """Whether the task fits into the connection or not."""
    [pid] = pool.run(PID)
    os.kill(pid, signal.SIGSTOP)
    assert pool.run(("builtins:len", "x" * length)) == [length]
    assert is_gone(pid)


def test_long_messages_travel(pool: AnyPool):
    text = "é" * (3 << 20)
    assert pool.run(("builtins:str", text), TWO) == [text, 2]


def test_processes_that_do_not_start_are_an_error_with_the_reason(kind: str):
    with AnyPool(kind, preload=["no_such_module_anywhere"]) as pool:
        with pytest.raises(RuntimeError) as caught:
            raise pool.run(TWO)[0]
        names = "decoding workers" if pool.decodes else "checking processes"
        assert f"{names} do not start (3 tries, last: exit code 1).\n" in str(caught.value)
        assert "No module named 'no_such_module_anywhere'" in str(caught.value)
        with pytest.raises(RuntimeError, match="have failed" if pool.decodes else "do not start"):
            pool.run(TWO)


def test_no_process_before_the_first_task_and_none_after_close(kind: str):
    with AnyPool(kind) as pool:
        assert pool.pool.pids == []
        [pid] = pool.run(PID)
        pool.pool.close()
        assert is_gone(pid) and pool.pool.pids == []
        with pytest.raises(RuntimeError, match="is closed; nothing can be"):
            pool.run(PID)


def test_nothing_is_left_open(kind: str):
    """Neither by losses nor at the end: descriptors, processes, files (these have no names)."""

    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    def children() -> set[str]:
        return set(" ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split())

    before, ours = held(), children()
    with AnyPool(kind, workers=2) as pool:
        pool.run(*[TWO] * 4)
        running = held()
        pool.run(*[("os:_exit", 1)] * 6, *[TWO] * 4)
        assert held() <= running
    assert held() <= before + 2 and children() <= ours  # a module that was imported meanwhile may hold a file


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_workers_die_with_their_parent_and_never_run_its_main(kind: str, end: str, tmp_path: Path):
    """A parent script without a main guard: idle and busy workers end; the script's body ran once.

    What a task started ends, too, where workers lead a group of their own.
    """
    script = tmp_path / "train.py"
    body = """
        import os, sys, threading, time
        open("ran", "a").write("x")
        from tests.unit.killable.helpers import AnyPool, others_in_group
        pool = AnyPool(sys.argv[1], workers=2)
        pool.run(("time:sleep", 0.01), ("os:getpid",))
        busy = threading.Thread(target=pool.run, args=[("subprocess:call", ["sleep", "600"])], daemon=True)
        busy.start()
        while len(pool.pool.pids) < 2 or not any(worker.has_begun and worker.task for worker in pool.inner.workers):
            time.sleep(0.01)
        pids, started = pool.pool.pids, []
        while not pool.decodes and not started:
            started = [other for pid in pids for other in others_in_group(pid)]
        print(*pids, *started, flush=True)
        if sys.argv[2] == "exits":
            os._exit(0)
        time.sleep(600)
    """
    script.write_text(textwrap.dedent(body))
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3]))
    command = [sys.executable, str(script), kind, end]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        if end == "killed":
            parent.kill()
    assert len(pids) == (2 if kind == "decoding" else 3) and wait_until_gone(pids)
    assert (tmp_path / "ran").read_text() == "x"


LONG = 8_000_000
ME = "tests.unit.killable.test_guarantees"


def long_text_then_killed() -> str:
    """Its answer does not fit into the line, so that it is still being sent when this process ends."""
    Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return "x" * LONG


def dies_in_its_first_start(folder: str) -> None:
    """Each of the first three processes, once all three are there: so they are in different slots."""
    for position in range(3):
        try:
            os.close(os.open(f"{folder}/{position}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        while len(os.listdir(folder)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_ends_in_the_middle_of_its_answer_costs_its_task(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    read = Connection._recv  # type: ignore[attr-defined]

    def late(self: Connection, size: int, *arguments: Any) -> Any:
        if size >= LONG:
            wait_until_gone(pids)
        return read(self, size, *arguments)

    with AnyPool(kind, deadline_seconds=20.0) as pool:
        assert pool.run(("operator:add", 1, 1)) == [2]
        pids += pool.pool.pids
        monkeypatch.setattr(Connection, "_recv", late)
        lost, after = pool.run((f"{ME}:long_text_then_killed",), ("operator:add", 2, 3))
    assert "signal SIGKILL" in str(lost) and after == 5


def test_an_answer_that_cannot_be_read_reaches_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(answer: io.BytesIO) -> Any:
        raise MemoryError("no room for this answer")

    with WorkerPool(1, 20.0) as pool:
        assert pool.submit(os.getpid).result(timeout=120) > 0
        monkeypatch.setattr(pickle, "load", unreadable)
        with pytest.raises(MemoryError, match="no room for this answer"):
            pool.submit(os.getpid).result(timeout=60)


def test_processes_killed_once_each_while_they_start_are_replaced(tmp_path: Path) -> None:
    settings = CheckerSettings(workers=4, timeout_seconds=20.0)
    pool = CheckerPool(settings, [Call(f"{ME}:dies_in_its_first_start", (str(tmp_path),))])
    try:
        assert [outcome.value for outcome in pool.run([Call("operator:add", (1, 1))] * 4)] == [2] * 4
    finally:
        pool.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_pool_that_could_not_start_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = Template.start, [OSError(24, "Too many open files")]

    def refuses_once(self: Template) -> Any:
        if refused:
            raise refused.pop()
        return start(self)

    monkeypatch.setattr(Template, "start", refuses_once)
    with WorkerPool(1, 20.0) as pool:
        with pytest.raises(OSError, match="Too many open files"):
            pool.submit(os.getpid)
        assert pool.submit(os.getpid).result(timeout=120) > 0


def _parent(deadline: float = 60.0) -> tuple[int, int]:
    """A worker of a new pool, and what it was forked from."""
    with WorkerPool(1, deadline) as pool:
        return pool.submit(os.getpid).result(), pool.submit(os.getppid).result()


def test_a_template_is_taken_again_for_an_equal_one(kept_templates: KeptTemplates) -> None:
    (first, parent), again = _parent(), _parent()
    assert again[1] == parent and again[0] != first
    assert not os.path.exists(f"/proc/{first}")


def test_another_environment_or_other_arguments_are_another_ones(
    kept_templates: KeptTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parent = _parent()
    assert _parent(61.0)[1] != parent
    monkeypatch.setenv("VLM_PG_OTHER", "1")
    assert _parent()[1] != parent


def test_one_that_has_ended_is_not_taken(kept_templates: KeptTemplates) -> None:
    _, parent = _parent()
    kept_templates.end()
    assert not os.path.exists(f"/proc/{parent}")
    assert _parent()[1] != parent

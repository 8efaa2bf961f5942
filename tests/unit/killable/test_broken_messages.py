"""What goes wrong between a pool and its workers costs one task, and nobody waits for ever."""

from __future__ import annotations

import io
import os
import pickle
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tests.unit.killable.helpers import AnyPool, wait_until_gone
from vlm_pg.killable.template import Template
from vlm_pg.media.pool import WorkerPool

LONG = 8_000_000
ME = "tests.unit.killable.test_broken_messages"


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


@pytest.mark.parametrize("kind", ["decoding", "checking"])
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
    from vlm_pg.answers.pool import Call, CheckerPool
    from vlm_pg.rewards.settings import CheckerSettings

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

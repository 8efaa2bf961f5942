"""Checking processes: a hard deadline and a memory limit per task. They start with the first task.

Messages in both directions are JSON: nothing that a model wrote is ever unpickled.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from vlm_pg.answers.verdict import CheckerSettings
from vlm_pg.killable.pool import Pool, Starter, Task
from vlm_pg.killable.worker import limit_memory, serve
from vlm_pg.processes import resolve

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Call:
    """A task: ``function`` ("package.module:function") of ``arguments``, all of them JSON values."""

    function: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """A task's JSON value, or the ``problem`` instead of one.

    ``trace``: traceback of an exception. ``seconds``: duration in the worker; None if that was killed.
    """

    value: Any = None
    problem: str = ""
    trace: str = ""
    seconds: float | None = None


class _Check(Task):
    def __init__(self, call: Call, timeout_seconds: float):
        self._call, self._timeout_seconds = call, timeout_seconds
        self.outcome: Outcome | None = None

    def message(self) -> bytes:
        return json.dumps((self._call.function, self._call.arguments)).encode()

    def answered(self, answer: bytes) -> None:
        self.outcome = Outcome(**json.loads(answer))

    def lost(self, how: str, output: str) -> None:
        too_slow = f"deadline: it took longer than {self._timeout_seconds:g} s and was stopped"
        self.outcome = Outcome(problem=f"its process ended by itself ({how})" if how else too_slow)


class CheckerPool:
    """Runs tasks in ``settings.workers`` processes, without threads: forking between two calls is safe.

    Args:
        settings: processes, deadline and memory limit.
        preload: run by each process before its first task, outside of deadline and memory limit.
        warn: called once if this system cannot limit memory.
    """

    def __init__(
        self, settings: CheckerSettings, preload: Sequence[Call] = (), warn: Callable[[str], None] = warnings.warn
    ):
        self._settings, self._warn = settings, warn
        timeout_seconds = settings.timeout_seconds
        arguments = (timeout_seconds, [(call.function, call.arguments) for call in preload], settings.memory_mb)
        starter = Starter(f"{__name__}:main", arguments, timeout_seconds)
        self._pool = Pool(starter, timeout_seconds, "checking processes")
        self._run_lock = threading.Lock()
        self._is_closed = self._has_warned = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the current workers; empty before the first task."""
        return self._pool.pids

    def run(self, calls: Sequence[Call], should_stop: Callable[[], bool] | None = None) -> list[Outcome]:
        """The outcomes of all calls, in order; a failed task has an outcome, too.

        ``should_stop`` is polled in this thread; True kills all processes.

        Raises:
            RuntimeError: the pool is closed, or its processes do not start.
            InterruptedError: after ``should_stop``.
        """
        with self._run_lock:
            if self._is_closed:
                raise RuntimeError("the pool of checking processes is closed; nothing can be run in it")
            checks = [_Check(call, self._settings.timeout_seconds) for call in calls]
            self._pool.grow(min(self._settings.workers, len(checks)))
            self._pool.waiting.extend(checks)
            try:
                while self._pool.is_working:
                    self._pool.poll(None if should_stop is None else POLL_SECONDS)
                    if self._pool.is_working and should_stop is not None and should_stop():
                        raise InterruptedError("scoring was stopped")
            except BaseException:  # stopped, or processes that do not start
                self._pool.end_all()
                raise
            if not self._has_warned and not all(worker.limited for worker in self._pool.workers):
                self._has_warned = True
                self._warn(
                    "reward.checker.memory_mb cannot be enforced on this system: address space is limited on Linux "
                    "only. The deadline (reward.checker.timeout_seconds) holds. (Shown once.)"
                )
            return [check.outcome for check in checks if check.outcome is not None]

    def close(self) -> None:
        """Kill all processes. May be called twice."""
        self._is_closed = True
        self._pool.end_all()


def main(
    descriptor: int, parent_pid: int, deadline_seconds: float, preload: Sequence[Sequence[Any]], memory_mb: int
) -> None:
    """The checking process: serve tasks until the parent hangs up.

    Args:
        descriptor, parent_pid, deadline_seconds: as in ``serve``.
        preload: calls (name, arguments) that run before the first task, so that no task's deadline or memory includes
            their imports.
        memory_mb: MiB of address space that a task may use beyond that.
    """

    def prepare(_connection: Connection) -> bool:
        for name, arguments in preload:
            resolve(name)(*arguments)
        try:
            limit_memory("address space", memory_mb << 20)
        except (OSError, ValueError):
            return False
        finally:
            # A task may print without end: discard standard error like standard output.
            sys.stderr.flush()
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            os.close(devnull)
        return True

    serve(descriptor, parent_pid, deadline_seconds, prepare, _run)


def _run(message: bytes) -> tuple[bytes, bool]:
    """One task's ``Outcome`` as JSON, and whether its process is used up."""
    function, arguments = json.loads(message)
    started = time.perf_counter()
    answer: dict[str, Any]
    used_up = False
    try:
        answer = {"value": resolve(function)(*arguments)}
        json.dumps(answer)  # inside the try: a value that is not JSON is the task's fault
    except MemoryError:
        # The memory may still be held, and would be missing for the next task.
        answer = {"problem": "out of memory: it needs more than reward.checker.memory_mb"}
        used_up = True
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:300]
        problem = f"{type(error).__name__}: {text}" if text else type(error).__name__
        answer = {"problem": problem, "trace": traceback.format_exc()[-4000:]}  # the end of a deep recursion matters
    return json.dumps(answer | {"seconds": time.perf_counter() - started}).encode(), used_up

"""The checking processes: a hard deadline and a memory limit per task. They start with the first task."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.answers.verdict import CheckerSettings
from vlm_pg.killable.pool import Pool
from vlm_pg.killable.starting import Starter, Task

POLL_SECONDS = 0.2  # between two questions whether to stop


@dataclass(frozen=True)
class Call:
    """A task: ``function`` ("package.module:function") of ``arguments``, all of them JSON values."""

    function: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a task: its JSON value, or the ``problem`` that kept it from having one.

    ``trace``: traceback of an exception of the task. ``seconds``: what it took, in the worker; None if that was killed.
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

    def lost(self, how: str, said: str) -> None:
        too_slow = f"deadline: it took longer than {self._timeout_seconds:g} s and was stopped"
        self.outcome = Outcome(problem=f"its process ended by itself ({how})" if how else too_slow)


class CheckerPool:
    """Runs tasks in ``settings.workers`` processes, with no thread: a fork between two calls is harmless.

    Args:
        settings: processes, deadline and memory limit.
        preload: run by each process before its first task, outside of deadline and memory limit.
        warn: told once if this system cannot limit memory.
    """

    def __init__(
        self, settings: CheckerSettings, preload: Sequence[Call] = (), warn: Callable[[str], None] = warnings.warn
    ):
        self._settings, self._warn = settings, warn
        timeout_seconds = settings.timeout_seconds
        arguments = (timeout_seconds, [(call.function, call.arguments) for call in preload], settings.memory_mb)
        starter = Starter("vlm_pg.answers.pool_worker:main", arguments, timeout_seconds)
        self._pool = Pool(starter, timeout_seconds, "checking processes")
        self._run_lock = threading.Lock()
        self._closed = False
        self._unlimited = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now; empty before the first task."""
        return self._pool.pids

    def run(self, calls: Sequence[Call], should_stop: Callable[[], bool] | None = None) -> list[Outcome]:
        """The outcomes of all calls, in order. A task that fails in any way is an outcome, too.

        ``should_stop`` is asked now and then, in this thread; once it says so, all processes are killed.

        Raises:
            RuntimeError: the pool is closed, or its processes do not start.
            InterruptedError: ``should_stop`` said so.
        """
        with self._run_lock:
            if self._closed:
                raise RuntimeError("the pool of checking processes is closed; nothing can be run in it")
            checks = [_Check(call, self._settings.timeout_seconds) for call in calls]
            self._pool.grow(min(self._settings.workers, len(checks)))
            self._pool.waiting.extend(checks)
            try:
                while self._pool.is_working:
                    self._pool.turn(None if should_stop is None else POLL_SECONDS)
                    if self._pool.is_working and should_stop is not None and should_stop():
                        raise InterruptedError("scoring was stopped")
            except BaseException:  # stopped, or processes that do not start
                self._pool.end_all()
                raise
            self._say_if_unlimited()
            return [check.outcome for check in checks if check.outcome is not None]

    def _say_if_unlimited(self) -> None:
        if not self._unlimited and not all(worker.limited for worker in self._pool.workers):
            self._unlimited = True
            self._warn(
                "reward.checker.memory_mb cannot be enforced on this system: address space is limited on Linux only. "
                "The deadline (reward.checker.timeout_seconds) holds. (Said once.)"
            )

    def close(self) -> None:
        """Kill all processes. May be called twice."""
        self._closed = True
        self._pool.end_all()

"""A pool of checking processes: a hard deadline and a memory limit per task, and a new process for a killed one.

Processes start with the first task. Threads exist only while ``run`` does, so a fork between two calls is harmless.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from vlm_pg.processes import ended_by_alarm, how_it_ended, kill_group
from vlm_pg.rewards.settings import CheckerSettings

START_SECONDS = 300.0
MAX_FAILED_STARTS = 3
HANG_UP_SECONDS = 5.0  # between the end of a process's connection and its own
POLL_SECONDS = 0.2  # between two questions whether to stop
# The worker's own alarm comes after the parent's deadline: it matters only when the parent is gone.
ALARM_FACTOR, ALARM_EXTRA_SECONDS = 1.5, 5.0
_BOOT = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "from vlm_pg.rewards.pool_worker import main; main(*json.loads(sys.argv[2]))"
)
# Numeric libraries read these at start-up: a worker is one thread.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


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


class CheckerPool:
    """Runs tasks in ``settings.workers`` processes.

    Args:
        settings: processes, deadline and memory limit.
        preload: run by each process before its first task, outside of deadline and memory limit.
        warn: told once if this system cannot limit memory.
    """

    def __init__(
        self, settings: CheckerSettings, preload: Sequence[Call] = (), warn: Callable[[str], None] = warnings.warn
    ):
        self._settings, self._warn = settings, warn
        self._workers = [_Worker(settings, preload) for _ in range(settings.workers)]
        self._run_lock = threading.Lock()
        self._closed = False
        self._unlimited = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now; empty before the first task."""
        return [pid for worker in self._workers if (pid := worker.pid) is not None]

    def run(self, calls: Sequence[Call], should_stop: Callable[[], bool] | None = None) -> list[Outcome]:
        """The outcomes of all calls, in order. A task that fails in any way is an outcome, too.

        ``should_stop`` is asked now and then, in this thread; once it says so, all running tasks are killed.

        Raises:
            RuntimeError: the pool is closed, or its processes do not start.
            InterruptedError: ``should_stop`` said so.
        """
        with self._run_lock:
            if self._closed:
                raise RuntimeError("the pool of checking processes is closed; nothing can be run in it")
            outcomes: list[Outcome] = [Outcome()] * len(calls)
            waiting = deque(enumerate(calls))

            def serve(worker: _Worker) -> None:
                while True:
                    try:
                        place, call = waiting.popleft()
                    except IndexError:
                        return
                    outcomes[place] = worker.run(call)

            busy = self._workers[: len(calls)]
            for worker in busy:
                if worker.interrupted:
                    worker.kill()  # it was idle then: it may not have ended yet, and must not be given a task
                worker.interrupted = False
            with ThreadPoolExecutor(max(1, len(busy)), thread_name_prefix="vlm_pg-checker") as threads:
                served = [threads.submit(serve, worker) for worker in busy]
                try:
                    while not _are_done(served, None if should_stop is None else POLL_SECONDS):
                        if should_stop is not None and should_stop():
                            raise InterruptedError("scoring was stopped")
                except BaseException:  # stopped, or processes that do not start: the other threads must not go on
                    waiting.clear()
                    for worker in busy:
                        worker.interrupt()
                    raise
            self._say_if_unlimited()
            return outcomes

    def _say_if_unlimited(self) -> None:
        if not self._unlimited and any(worker.limited is False for worker in self._workers):
            self._unlimited = True
            self._warn(
                "reward.checker.memory_mb cannot be enforced on this system: address space is limited on Linux only. "
                "The deadline (reward.checker.timeout_seconds) holds. (Said once.)"
            )

    def close(self) -> None:
        """Kill all processes. May be called twice."""
        self._closed = True
        for worker in self._workers:
            worker.kill()


def _are_done(served: Sequence[Future[None]], timeout_seconds: float | None) -> bool:
    """Whether all have ended after at most this time; raises what one of them raised."""
    done, running = wait(served, timeout_seconds, FIRST_EXCEPTION)
    for future in done:
        future.result()
    return not running


class _Worker:
    """One place of the pool: a process, and a new one whenever it was lost."""

    def __init__(self, settings: CheckerSettings, preload: Sequence[Call]):
        self._settings = settings
        self._preload = [(call.function, call.arguments) for call in preload]
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stderr: IO[bytes] | None = None
        self._ready = False
        self.interrupted = False
        self.limited: bool | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, call: Call) -> Outcome:
        timeout_seconds = self._settings.timeout_seconds
        message = {
            "task": call.function,
            "arguments": call.arguments,
            "alarm_seconds": timeout_seconds * ALARM_FACTOR + ALARM_EXTRA_SECONDS,
        }
        too_slow = Outcome(problem=f"deadline: it took longer than {timeout_seconds:g} s and was stopped")
        try:
            connection = self._hand_over(json.dumps(message).encode())
            if not connection.poll(timeout_seconds):
                self._restart()
                return too_slow
            answer = json.loads(connection.recv_bytes())
        except InterruptedError:  # an OSError, too, but no end of a process
            raise
        except (EOFError, OSError):
            how = self._how_it_ended()
            self._restart()
            if how == ended_by_alarm():  # this process was late itself
                return too_slow
            return Outcome(problem=f"its process ended by itself ({how})")
        if answer.get("used_up"):
            self._restart()
        return Outcome(
            answer.get("value"), answer.get("problem", ""), answer.get("trace", ""), seconds=answer["seconds"]
        )

    def _hand_over(self, message: bytes) -> Connection:
        """The connection of a process that has begun with ``message``; a process that ended before is replaced once.

        It may have ended while it was idle: for some milliseconds neither its exit status nor its connection tell.

        Raises:
            EOFError, OSError: the second process ended before it began, too, or did not begin within the deadline.
        """
        for last in (False, True):
            connection = self._wait_until_ready()
            try:
                connection.send_bytes(message)
                if not connection.poll(self._settings.timeout_seconds):
                    raise EOFError
                connection.recv_bytes()
                return connection
            except (EOFError, OSError):
                if last:
                    raise
                self.kill()
        raise AssertionError("not reached")

    def kill(self) -> None:
        """End the process, if there is one, and what it started."""
        if self._process is not None and self._connection is not None and self._stderr is not None:
            kill_group(self._process.pid)
            self._process.wait()
            self._connection.close()
            self._stderr.close()
        self._process, self._ready = None, False

    def interrupt(self) -> None:
        """End the process while another thread waits for it; that thread starts no other and takes no task."""
        self.interrupted = True
        if (process := self._process) is not None:
            kill_group(process.pid)

    def _restart(self) -> None:
        """A new process at once, not with the next task: it gets ready while others work."""
        self.kill()
        if not self.interrupted:
            self._start()

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            return how_it_ended(self._process.wait(HANG_UP_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (closed with the process)
        package_root = str(Path(__file__).parents[2])
        arguments = (theirs.fileno(), os.getpid(), self._preload, self._settings.memory_mb)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, package_root, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # what a task starts is killed with its process
            env=dict(os.environ, CUDA_VISIBLE_DEVICES="", **dict.fromkeys(_ONE_THREAD, "1")),
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def _wait_until_ready(self) -> Connection:
        """The connection of a process that takes tasks.

        Raises:
            RuntimeError: it does not start: a fault of the installation, not of a task.
            InterruptedError: ``interrupt`` was called meanwhile.
        """
        failed_starts = 0
        while True:
            if self.interrupted:
                raise InterruptedError("scoring was stopped")
            if self._process is None:
                self._start()
            assert self._process is not None and self._connection is not None
            if self._ready and self._process.poll() is None:
                return self._connection
            if not self._ready:
                try:
                    if self._connection.poll(START_SECONDS):
                        self.limited = json.loads(self._connection.recv_bytes())["limited"]
                        self._ready = True
                        continue
                    how = f"it was not ready after {START_SECONDS:g} s"
                except (EOFError, OSError):
                    how = self._how_it_ended()
                failed_starts += 1
                if failed_starts >= MAX_FAILED_STARTS:
                    said = self._last_words()
                    raise RuntimeError(f"checking processes do not start ({failed_starts} tries, last: {how}).\n{said}")
            self.kill()  # it ended while it was idle, or did not start: the next one is tried

    def _last_words(self, limit: int = 2000) -> str:
        """The end of what a process wrote to its standard error before its first task."""
        assert self._stderr is not None
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - limit))
        return self._stderr.read().decode(errors="replace").strip()

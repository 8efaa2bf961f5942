"""A pool of processes that can be killed: one call each, a deadline per call, crashed workers replaced.

A thread of the parent hands out calls and collects results, so work goes on while the caller computes.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Any

from vlm_pg.errors import SampleError
from vlm_pg.media import parent
from vlm_pg.media.template import Template
from vlm_pg.processes import ended_by_alarm

START_SECONDS = 300.0
MAX_FAILED_STARTS = 3
# the worker's own alarm comes after the parent's deadline: it matters only when the parent is gone
ALARM_FACTOR, ALARM_EXTRA_SECONDS = 1.5, 5.0
POLL_SECONDS = 0.2


@dataclass
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    label: str
    future: Future[Any]


@dataclass
class _Worker:
    """``pid`` is known, and calls are taken, once it is ready."""

    connection: Connection
    stderr: IO[bytes]
    end_by_seconds: float
    pid: int | None = None
    call: _Call | None = None


class WorkerPool:
    """Runs calls in worker processes, which start with the first call or with ``start``.

    Args:
        workers: number of processes, at least 1.
        deadline_seconds: a call that takes longer is given up: its worker is killed and replaced.
        modules: what workers have imported before their first call.
        memory_bytes: how much memory a worker may take beyond what it holds then; 0 for no limit.

    A result arrives in the future that ``submit`` returns. Its exception is a SampleError ``decode_timeout`` or
    ``decoder_crashed``, the SampleError the function raised, or a RuntimeError with the traceback of a bug.
    """

    def __init__(self, workers: int, deadline_seconds: float, modules: Sequence[str] = (), memory_bytes: int = 0):
        self._deadline_seconds = deadline_seconds
        self._num_workers, self._settings = workers, (modules, memory_bytes)
        self._waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._failure: BaseException | None = None
        self._failed_starts = 0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._somebody_is_ready = threading.Event()
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let the processes start, in the background, unless they have."""
        with self._lock:
            if self._thread is None and not self._closing:
                self._template = Template(*self._settings)
                self._workers = [self._start_one() for _ in range(self._num_workers)]
                self._thread = threading.Thread(target=self._serve, name="vlm_pg-media-pool", daemon=True)
                self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether processes have been started."""
        return self._thread is not None

    @property
    def is_starting(self) -> bool:
        """Whether processes have been started and none of them takes calls yet."""
        return self._thread is not None and not self._somebody_is_ready.is_set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready or busy now."""
        return [worker.pid for worker in list(self._workers) if worker.pid is not None]

    def wait_until_ready(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for the first worker of a started pool, or for the failure that ``submit`` will raise.

        Raises:
            InterruptedError: ``should_stop`` said so; it is asked several times a second.
        """
        while not self._somebody_is_ready.wait(POLL_SECONDS):
            if should_stop():
                raise InterruptedError("stopped while the decoding workers were starting")

    def submit(self, function: Callable[..., Any], *args: Any, label: str = "") -> Future[Any]:
        """Queue ``function(*args)``; the function must be importable by name. ``label`` names it in messages."""
        call = _Call(function, args, label or getattr(function, "__name__", "call"), Future())
        self.start()
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("the decoding workers have failed; see the cause above") from self._failure
            if self._closing:
                raise RuntimeError("the pool of decoding workers is closed; nothing can be submitted to it")
            self._waiting.append(call)
        self._wake()
        return call.future

    def close(self) -> None:
        """Kill all workers, busy or not, and fail what is still pending. May be called twice."""
        with self._lock:
            self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is being woken already; closed: it has ended
            self._wake_write.send(b"x")

    def _start_one(self) -> _Worker:
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed with the worker
        # The worker writes at the end, wherever that is: the file is emptied between calls.
        flags = fcntl.fcntl(stderr, fcntl.F_GETFL)
        fcntl.fcntl(stderr, fcntl.F_SETFL, flags | os.O_APPEND)
        self._template.fork(theirs, stderr)
        theirs.close()
        return _Worker(Connection(ours.detach()), stderr, time.monotonic() + START_SECONDS)

    def _serve(self) -> None:
        """The pool's thread. Whatever stops it fails all pending calls: nobody may wait for ever."""
        cause: BaseException = RuntimeError("the pool of decoding workers was closed before this file was decoded")
        try:
            while not self._closing:
                self._hand_out()
                self._collect()
                self._end_overdue()
        except BaseException as error:  # handed to every waiting caller below
            cause = error
        with self._lock:
            self._failure = None if self._closing else cause
            left = [worker.call for worker in self._workers if worker.call] + list(self._waiting)
            self._waiting.clear()
        # One that is still importing would answer only when it is done, and nobody needs it any more.
        self._template.close(at_once=not self._somebody_is_ready.is_set())
        for worker in self._workers:
            worker.connection.close()
            worker.stderr.close()
        self._workers = []
        self._somebody_is_ready.set()
        for call in left:
            _settle(call, error=cause)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.pid is None or worker.call is not None:
                continue
            with self._lock:
                call = self._waiting.popleft() if self._waiting else None
            if call is None:
                return
            worker.call = call
            worker.stderr.truncate(0)
            worker.end_by_seconds = time.monotonic() + self._deadline_seconds
            alarm_seconds = self._deadline_seconds * ALARM_FACTOR + ALARM_EXTRA_SECONDS
            with suppress(BrokenPipeError, ConnectionResetError):  # the worker died idle: seen as a hang-up next
                worker.connection.send_bytes(pickle.dumps((call.function, call.args, alarm_seconds)))

    def _collect(self) -> None:
        """Wait for results, hang-ups, new calls or the next deadline."""
        ends = [worker.end_by_seconds for worker in self._workers if worker.call or worker.pid is None]
        timeout_seconds = max(0.0, min(ends) - time.monotonic()) if ends else None
        template = self._template.fileno()
        connections = [worker.connection for worker in self._workers]
        ready = wait([self._wake_read, template, *connections], timeout_seconds)
        if template in ready:
            self._replace_template()
            return
        for position, worker in enumerate(self._workers):
            if worker.connection not in ready:
                continue
            try:
                kind, value = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._replace_dead(position)
                return  # maybe there are other workers now
            self._take(worker, kind, value)
        if self._wake_read in ready:
            self._wake_read.recv(4096)

    def _take(self, worker: _Worker, kind: str, value: Any) -> None:
        """A message of a worker: it is ready for its first call, it asks something, or its call ended."""
        if kind == "ready":
            worker.pid = value
            self._somebody_is_ready.set()
            return
        if kind == "asks":
            with suppress(BrokenPipeError, ConnectionResetError):  # it died: seen as a hang-up next
                worker.connection.send(parent.answer(*value))
            return
        call, worker.call, self._failed_starts = worker.call, None, 0
        assert call is not None
        if kind == "done":
            _settle(call, value)
        elif kind == "bad_sample":
            _settle(call, error=SampleError(*value))
        else:
            _settle(call, error=RuntimeError(f"a bug surfaced while decoding {call.label}:\n{value}"))

    def _end_overdue(self) -> None:
        for position, worker in enumerate(self._workers):
            busy = worker.call is not None or worker.pid is None
            if not busy or time.monotonic() < worker.end_by_seconds or worker.connection.poll():
                continue
            if self._end(worker) is None:
                return self._replace_template()
            if worker.call is None:
                self._count_failed_start(f"it was not ready after {START_SECONDS:g} s", worker.stderr)
            self._replace(position)
            if worker.call is not None:
                _settle(worker.call, error=self._too_slow(worker.call))

    def _replace_dead(self, position: int) -> None:
        worker = self._workers[position]
        how = self._end(worker)
        if how is None:
            return self._replace_template()
        if worker.pid is None:
            self._count_failed_start("it ended before it was ready", worker.stderr)
        said = _last_words(worker.stderr)
        self._replace(position)
        if worker.call is not None and how == ended_by_alarm():  # this process was late itself
            _settle(worker.call, error=self._too_slow(worker.call))
        elif worker.call is not None:
            message = (
                f"the decoder crashed on {worker.call.label}: {how}{': ' + said if said else ''}. Files that crash a "
                "decoder cannot be used. Re-encode the file, try media.decoder=pyav, or remove the sample."
            )
            _settle(worker.call, error=SampleError("decoder_crashed", message))

    def _replace(self, position: int) -> None:
        """Another worker in the place of one that has ended."""
        self._workers[position].stderr.close()
        self._workers[position] = self._start_one()

    def _replace_template(self) -> None:
        """It ended, and its workers with it: the files that they were at are nothing to blame, and are begun again."""
        self._count_failed_start(self._template.wait(), self._template.stderr)
        with self._lock:
            self._waiting.extendleft(worker.call for worker in self._workers if worker.call is not None)
        for worker in self._workers:
            worker.connection.close()
            worker.stderr.close()
        self._template.close()
        self._template = Template(*self._settings)
        self._workers = [self._start_one() for _ in self._workers]

    def _end(self, worker: _Worker) -> str | None:
        """Kill a worker, if it still runs; how it ended, None if the template has ended."""
        how = "" if worker.pid is None else self._template.end(worker.pid)
        worker.connection.close()  # ends one that is not known by its id yet
        return how

    def _too_slow(self, call: _Call) -> SampleError:
        return SampleError(
            "decode_timeout",
            f"decoding {call.label} took longer than {self._deadline_seconds:g} s and was given up. Files must decode "
            "within media.deadline_seconds. Raise it, re-encode the file, or remove the sample.",
        )

    def _count_failed_start(self, how: str, stderr: IO[bytes]) -> None:
        """A worker that cannot even start is a fault of the installation, not of a file."""
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            said = _last_words(stderr, limit=2000)
            raise RuntimeError(f"decoding workers do not start ({self._failed_starts} tries, last: {how}).\n{said}")


def _settle(call: _Call, value: Any = None, error: BaseException | None = None) -> None:
    """Give the caller its result, unless it cancelled the call."""
    if call.future.set_running_or_notify_cancel():
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(value)


def _last_words(stderr: IO[bytes], limit: int = 300) -> str:
    """The end of what a worker wrote to its standard error."""
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - limit))
    return " / ".join(stderr.read().decode(errors="replace").split("\n")).strip(" /")

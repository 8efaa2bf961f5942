"""A pool of processes that can be killed: one call each, a deadline per call, crashed workers replaced.

A thread of the parent hands out calls and collects results, so work goes on while the caller computes.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from vlm_pg.errors import SampleError
from vlm_pg.processes import ended_by_alarm, how_it_ended

START_SECONDS = 300.0
MAX_FAILED_STARTS = 3
# the worker's own alarm comes after the parent's deadline: it matters only when the parent is gone
ALARM_FACTOR, ALARM_EXTRA_SECONDS = 1.5, 5.0
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from vlm_pg.media.worker import main; main({}, {}, {}, {})"
# numeric libraries read these at start-up, torch too: a worker is one thread
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    label: str
    future: Future[Any]


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    end_by_seconds: float
    ready: bool = False
    call: _Call | None = None


class WorkerPool:
    """Runs calls in worker processes.

    Args:
        workers: number of processes, at least 1.
        deadline_seconds: a call that takes longer is given up: its worker is killed and replaced.
        modules: what every worker imports before its first call.
        memory_bytes: how much memory a worker may take beyond what it holds then; 0 for no limit.

    A result arrives in the future that ``submit`` returns. Its exception is a SampleError ``decode_timeout`` or
    ``decoder_crashed``, the SampleError the function raised, or a RuntimeError with the traceback of a bug.
    """

    def __init__(self, workers: int, deadline_seconds: float, modules: Sequence[str] = (), memory_bytes: int = 0):
        self._deadline_seconds = deadline_seconds
        self._memory_bytes = memory_bytes
        self._modules = tuple(modules)
        self._waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._failure: BaseException | None = None
        self._failed_starts = 0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._workers = [self._start() for _ in range(workers)]
        self._thread = threading.Thread(target=self._serve, name="vlm_pg-media-pool", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [worker.process.pid for worker in list(self._workers)]

    def submit(self, function: Callable[..., Any], *args: Any, label: str = "") -> Future[Any]:
        """Queue ``function(*args)``; the function must be importable by name. ``label`` names it in messages."""
        call = _Call(function, args, label or getattr(function, "__name__", "call"), Future())
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
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is being woken already; closed: it has ended
            self._wake_write.send(b"x")

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed with the worker
        # The worker writes at the end, wherever that is: the file is emptied between calls.
        flags = fcntl.fcntl(stderr, fcntl.F_GETFL)
        fcntl.fcntl(stderr, fcntl.F_SETFL, flags | os.O_APPEND)
        package_root = str(Path(__file__).parents[2])
        code = _BOOT.format(theirs.fileno(), os.getpid(), self._modules, self._memory_bytes)
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", **dict.fromkeys(_ONE_THREAD, "1"))
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, package_root],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=(theirs.fileno(),),
            env=environment,
        )
        theirs.close()
        return _Worker(process, Connection(ours.detach()), stderr, time.monotonic() + START_SECONDS)

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
        for worker in self._workers:
            self._kill(worker)
            worker.stderr.close()
        self._workers = []
        for call in left:
            _settle(call, error=cause)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.call is not None:
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
        ends = [worker.end_by_seconds for worker in self._workers if worker.call or not worker.ready]
        timeout_seconds = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = wait([self._wake_read, *(worker.connection for worker in self._workers)], timeout_seconds)
        for position, worker in enumerate(self._workers):
            if worker.connection not in ready:
                continue
            try:
                kind, value = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._replace_dead(position)
                continue
            self._take(worker, kind, value)
        if self._wake_read in ready:
            self._wake_read.recv(4096)

    def _take(self, worker: _Worker, kind: str, value: Any) -> None:
        """A message of a worker: it is ready for its first call, or its call ended."""
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
            return
        call, worker.call = worker.call, None
        assert call is not None
        if kind == "done":
            _settle(call, value)
        elif kind == "bad_sample":
            _settle(call, error=SampleError(*value))
        else:
            _settle(call, error=RuntimeError(f"a bug surfaced while decoding {call.label}:\n{value}"))

    def _end_overdue(self) -> None:
        for position, worker in enumerate(self._workers):
            busy = worker.call is not None or not worker.ready
            if not busy or time.monotonic() < worker.end_by_seconds or worker.connection.poll():
                continue
            call = worker.call
            self._kill(worker)
            if call is None:
                self._count_failed_start(f"it was not ready after {START_SECONDS:g} s", worker)
            else:
                _settle(call, error=self._too_slow(call))
            worker.stderr.close()
            self._workers[position] = self._start()

    def _replace_dead(self, position: int) -> None:
        worker = self._workers[position]
        self._kill(worker)
        how = how_it_ended(worker.process.returncode)
        if not worker.ready:
            self._count_failed_start(how, worker)
        elif worker.call is not None and how == ended_by_alarm():  # this process was late itself
            _settle(worker.call, error=self._too_slow(worker.call))
        elif worker.call is not None:
            said = _last_words(worker.stderr)
            message = (
                f"the decoder crashed on {worker.call.label}: {how}{': ' + said if said else ''}. Files that crash a "
                "decoder cannot be used. Re-encode the file, try media.decoder=pyav, or remove the sample."
            )
            _settle(worker.call, error=SampleError("decoder_crashed", message))
        worker.stderr.close()
        self._workers[position] = self._start()

    def _too_slow(self, call: _Call) -> SampleError:
        return SampleError(
            "decode_timeout",
            f"decoding {call.label} took longer than {self._deadline_seconds:g} s and was given up. Files must decode "
            "within media.deadline_seconds. Raise it, re-encode the file, or remove the sample.",
        )

    def _count_failed_start(self, how: str, worker: _Worker) -> None:
        """A worker that cannot even start is a fault of the installation, not of a file."""
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            said = _last_words(worker.stderr, limit=2000)
            raise RuntimeError(f"decoding workers do not start ({self._failed_starts} tries, last: {how}).\n{said}")

    @staticmethod
    def _kill(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        worker.connection.close()


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

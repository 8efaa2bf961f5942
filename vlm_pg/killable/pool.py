"""Processes that can be killed, one task each; a lost one is replaced. They decode media and check answers.

Guarantees, for any kind of worker and either way of starting (fresh interpreters here, forks in ``template.py``):

- A worker that exceeds its task's deadline is killed, one that ends is replaced at once. The loss is reported for that
  task alone, with the process's exit status and last output.
- The deadline begins when a worker begins the task. A worker that ended before that (it was killed while idle, or was
  just ending) costs no task: another worker gets it, once.
- No result can be another task's: each process has its own connection, closed when the process is killed.
- C code that holds the interpreter's lock is stopped too: by the parent, or, if that is gone, by a kernel alarm
  (``worker.py``). A task that its own alarm ended has exceeded the deadline.
- The kernel limits memory (``worker.limit_memory``). A worker may report that it is used up, and is replaced.
- Processes that do not start are a fault of the installation: an error with their output, after three in one slot.
- All end with their parent, killed or not, and continue when a signal ends the whole job (``vlm_pg.processes``).
- Messages are bytes, whose meaning is the owner's: pickles of frames, JSON of answers. A worker that stalls within a
  message is given up.

There is no thread here: the owner of a pool calls ``poll``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from vlm_pg.killable.worker import BEGUN, PARENT_CALL, READY, USED_UP
from vlm_pg.processes import ONE_THREAD_NO_GPU, ended_by_alarm, has_ended, how_it_ended, kill_group, start_interpreter

START_SECONDS = 300.0
HANG_UP_SECONDS = 5.0  # from the end of a process's connection to its own
MAX_FAILED_STARTS = 3
MAX_TRIES = 2


class Task:
    """A unit of work; ``Pool.poll`` calls its methods."""

    tries = 0

    def message(self) -> bytes:
        """Sent to the worker."""
        raise NotImplementedError

    def answered(self, answer: bytes) -> None:
        """Called with the worker's answer."""
        raise NotImplementedError

    def lost(self, how: str, output: str) -> None:
        """Its worker ended by itself (``how``, such as "signal SIGKILL"), or exceeded the deadline ("").

        ``output``: the end of the worker's standard error.
        """
        raise NotImplementedError


class AllEnded(Exception):
    """The process that forks all workers has ended, and they with it."""


@dataclass(eq=False)
class Worker:
    """A process as its parent sees it. ``end_by_seconds``: deadline by time.monotonic, unless it is idle."""

    connection: Connection
    stderr: IO[bytes]
    pid: int | None = None
    process: subprocess.Popen[bytes] | None = None
    end_by_seconds: float = 0.0
    is_ready: bool = False
    limited: bool = True
    task: Task | None = None
    has_begun: bool = False
    failed_starts: int = 0  # consecutive, in this slot

    @property
    def is_busy(self) -> bool:
        """Whether it has a task, or is starting."""
        return self.task is not None or not self.is_ready


class Starter:
    """Starts workers that call ``function(descriptor, parent_pid, *arguments)``; here each is a fresh interpreter.

    It leads its own session, so that programs started by a task are killed with it. Its standard output is discarded.

    Args:
        function: "package.module:function", called with JSON values.
        stall_seconds: a worker that stalls within a message for so long is given up.
    """

    def __init__(self, function: str, arguments: Sequence[Any], stall_seconds: float):
        self._function, self._arguments, self._stall_seconds = function, list(arguments), stall_seconds

    def watched(self) -> list[int]:
        """Descriptors that become readable when all workers have ended at once."""
        return []

    def start(self) -> Worker:
        """Start a worker without waiting until it is ready."""
        ours, theirs = self._connect()
        stderr = open_log()
        with theirs:
            process = start_interpreter(
                self._function,
                [theirs.fileno(), os.getpid(), *self._arguments],
                stderr,
                ONE_THREAD_NO_GPU,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return Worker(ours, stderr, process.pid, process, time.monotonic() + START_SECONDS)

    def end(self, worker: Worker, hung_up: bool) -> str:
        """Kill a worker and the programs it started; its exit status in words. ``hung_up``: it is ending by itself.

        Raises:
            AllEnded: all workers have ended together.
        """
        process = worker.process
        assert process is not None
        worker.connection.close()
        if process.returncode is not None:  # it has been ended before
            return how_it_ended(process.returncode)
        give_up = time.monotonic() + (HANG_UP_SECONDS if hung_up else 0.0)
        while not (ended := has_ended(process.pid)) and time.monotonic() < give_up:
            time.sleep(0.005)
        kill_group(process.pid)
        how = how_it_ended(process.wait())
        return "it closed its connection" if hung_up and not ended else how

    def restart(self) -> None:
        """Restart after ``AllEnded`` and ``how_all_ended``."""
        raise AssertionError("workers of their own do not end together")

    def how_all_ended(self) -> tuple[str, str]:
        """Exit status in words, and last output."""
        raise AssertionError("workers of their own do not end together")

    def end_all(self, workers: Sequence[Worker], at_once: bool) -> None:
        """Kill all workers. ``at_once``: without waiting for slow starts, since none has ever been ready."""
        for worker in workers:
            self.end(worker, hung_up=False)

    def _connect(self) -> tuple[Connection, socket.socket]:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(self._stall_seconds), int(self._stall_seconds % 1 * 1e6))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, limit)
        return Connection(ours.detach()), theirs


def open_log() -> IO[bytes]:
    """An unnamed file for a process's output, in append mode, so that it may be truncated at any time."""
    file = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed with the process
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_APPEND)
    return file


def last_output(log: IO[bytes], limit: int) -> str:
    """The end of the output."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - limit))
    return log.read().decode(errors="replace").strip()


class Pool:
    """Workers of one kind and their queue of tasks.

    Args:
        deadline_seconds: a task that takes longer is given up.
        name: of the processes in messages.
        handle_call: answers a worker's call of its parent within a task.
    """

    def __init__(
        self, starter: Starter, deadline_seconds: float, name: str, handle_call: Callable[[bytes], bytes] | None = None
    ):
        self._starter, self._deadline_seconds, self._name = starter, deadline_seconds, name
        self._handle_call = handle_call
        self._times_all_ended = 0
        self.waiting: deque[Task] = deque()
        self.workers: list[Worker] = []
        self.has_been_ready = False

    @property
    def pids(self) -> list[int]:
        """Process ids, as far as they are known."""
        return [worker.pid for worker in list(self.workers) if worker.pid is not None]

    @property
    def is_working(self) -> bool:
        """Whether a task waits or runs."""
        return bool(self.waiting) or any(worker.task is not None for worker in self.workers)

    def grow(self, count: int) -> None:
        """Let there be at least ``count`` workers."""
        while len(self.workers) < count:
            self.workers.append(self._starter.start())

    def poll(self, timeout_seconds: float | None = None, also: Sequence[Any] = ()) -> list[Any]:
        """Assign tasks, handle messages, and end overdue workers.

        Waits until the next message or deadline, at most ``timeout_seconds``, or until one of ``also`` is readable.

        Returns:
            The readable ones of ``also``.

        Raises:
            RuntimeError: the processes do not start.
        """
        try:
            self._assign()
            readable = self._collect(timeout_seconds, also)
            for worker in list(self.workers):
                is_late = worker.is_busy and time.monotonic() >= worker.end_by_seconds
                # A message that arrived in time is handled, unless the worker does not read.
                if is_late and (worker.end_by_seconds == 0.0 or not worker.connection.poll()):
                    self._lose(worker, hung_up=False)
        except AllEnded:
            self._restart()
            return []
        return readable

    def end_all(self) -> list[Task]:
        """Kill all workers, busy or not; returns the unfinished tasks."""
        left = [worker.task for worker in self.workers if worker.task is not None] + list(self.waiting)
        self.waiting.clear()
        self._starter.end_all(self.workers, at_once=not self.has_been_ready)
        for worker in self.workers:
            worker.stderr.close()
        self.workers, self._times_all_ended = [], 0
        return left

    def _assign(self) -> None:
        for worker in self.workers:
            if worker.is_busy:
                continue
            if not self.waiting:
                return
            if worker.connection.poll():  # it has ended while it was idle
                continue
            worker.task, worker.has_begun = self.waiting.popleft(), False
            worker.task.tries += 1
            worker.stderr.truncate(0)
            worker.end_by_seconds = time.monotonic() + self._deadline_seconds
            try:
                worker.connection.send_bytes(worker.task.message())
            except BlockingIOError:  # it does not read
                worker.end_by_seconds = 0.0
            except (BrokenPipeError, ConnectionResetError):  # it has just ended: seen as a hang-up next
                pass

    def _collect(self, timeout_seconds: float | None, also: Sequence[Any]) -> list[Any]:
        """Wait for messages, hang-ups, ``also`` or the next deadline; handle them. Returns the ready of ``also``."""
        ends = [worker.end_by_seconds - time.monotonic() for worker in self.workers if worker.is_busy]
        ends += [] if timeout_seconds is None else [timeout_seconds]
        watched = self._starter.watched()
        connections = [worker.connection for worker in self.workers]
        ready = wait([*watched, *also, *connections], max(0.0, min(ends)) if ends else None)
        if any(descriptor in ready for descriptor in watched):
            raise AllEnded
        for worker in list(self.workers):
            if worker.connection in ready:
                try:
                    self._take(worker, _received(worker))
                except BlockingIOError:  # stalled in a message
                    self._lose(worker, hung_up=False)
                except EOFError:
                    self._lose(worker, hung_up=True)
        return [readable for readable in ready if readable in also]

    def _take(self, worker: Worker, kind: bytes) -> None:
        if kind == READY:
            worker.pid, worker.limited = json.loads(_received(worker))
            worker.is_ready = self.has_been_ready = True
        elif kind == BEGUN:
            worker.has_begun, worker.end_by_seconds = True, time.monotonic() + self._deadline_seconds
        elif kind == PARENT_CALL:
            assert self._handle_call is not None
            answer = self._handle_call(_received(worker))
            with suppress(BrokenPipeError, ConnectionResetError):  # it has just ended: seen as a hang-up next
                worker.connection.send_bytes(answer)
        else:
            answer, self._times_all_ended = _received(worker), 0
            assert worker.task is not None
            # Removed after ``answered``: ``end_all`` returns it if that fails.
            worker.task.answered(answer)
            worker.task = None
            if kind == USED_UP:
                self._starter.end(worker, hung_up=False)
                self._replace(worker)

    def _lose(self, worker: Worker, hung_up: bool) -> None:
        """Replace a worker that has ended or is overdue, and report or requeue its task."""
        how = self._starter.end(worker, hung_up)
        task, output = worker.task, last_output(worker.stderr, 300)
        if not worker.is_ready:
            early = how or "it ended before it was ready"
            how = early if hung_up else f"it was not ready after {START_SECONDS:g} s"
            worker.failed_starts += 1
            self._refuse_if_hopeless(worker.failed_starts, how, last_output(worker.stderr, 2000))
        self._replace(worker)
        if task is None:
            return
        if not worker.has_begun and task.tries < MAX_TRIES:
            self.waiting.appendleft(task)
        elif not hung_up or how == ended_by_alarm():  # the alarm comes first if this process was late
            task.lost("", output)
        else:
            task.lost(how, output)

    def _replace(self, worker: Worker) -> None:
        worker.stderr.close()
        successor = self._starter.start()
        successor.failed_starts = 0 if worker.is_ready else worker.failed_starts
        self.workers[self.workers.index(worker)] = successor

    def _restart(self) -> None:
        """All have ended at once, which is no task's fault: requeue their tasks."""
        self._times_all_ended += 1
        self._refuse_if_hopeless(self._times_all_ended, *self._starter.how_all_ended())
        for worker in self.workers:
            if worker.task is not None:
                worker.task.tries = 0
                self.waiting.appendleft(worker.task)
            worker.connection.close()
            worker.stderr.close()
        self._starter.restart()
        self.workers = [self._starter.start() for _ in self.workers]

    def _refuse_if_hopeless(self, tries: int, how: str, output: str) -> None:
        """A worker that cannot start is a fault of the installation, not of a task."""
        if tries >= MAX_FAILED_STARTS:
            raise RuntimeError(f"{self._name} do not start ({tries} tries, last: {how}).\n{output}")


def _received(worker: Worker) -> bytes:
    """The worker's next message.

    Raises:
        EOFError: it has ended, also in the middle of the message.
        BlockingIOError: it stalls in the middle of the message.
    """
    try:
        return worker.connection.recv_bytes()
    except BlockingIOError:
        raise
    except OSError as error:
        raise EOFError from error

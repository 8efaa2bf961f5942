"""How workers start and end: here as fresh interpreters, in ``template.py`` forked from a process that all share."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

from vlm_pg.processes import ONE_THREAD_NO_GPU, has_ended, how_it_ended, kill_group, start_interpreter

START_SECONDS = 300.0
HANG_UP_SECONDS = 5.0  # between the end of a process's connection and its own


class Task:
    """What a worker is given, and what becomes of its answer. The pool's thread calls these."""

    tries = 0

    def message(self) -> bytes:
        """For the worker."""
        raise NotImplementedError

    def answered(self, answer: bytes) -> None:
        """The worker has sent this."""
        raise NotImplementedError

    def lost(self, how: str, said: str) -> None:
        """Its worker ended by itself (``how``: "signal SIGKILL"; it ``said`` this last), or it took too long ("")."""
        raise NotImplementedError


class AllEnded(Exception):
    """The process that all workers come from has ended, and they with it."""


@dataclass(eq=False)
class Worker:
    """A process as its parent sees it. ``end_by_seconds``: of time.monotonic, when it is not idle."""

    connection: Connection
    stderr: IO[bytes]
    pid: int | None = None
    process: subprocess.Popen[bytes] | None = None
    end_by_seconds: float = 0.0
    is_ready: bool = False
    limited: bool = True
    task: Task | None = None
    has_begun: bool = False
    failed_starts: int = 0  # running, of this place

    @property
    def is_busy(self) -> bool:
        """Whether something is expected of it: an answer, or that it gets ready."""
        return self.task is not None or not self.is_ready

    def last_words(self, limit: int) -> str:
        return last_words(self.stderr, limit)


class Starter:
    """Starts workers that call ``function(descriptor, parent_pid, *arguments)``; here each is a fresh interpreter.

    It leads a session of its own, so that what a task starts is killed with it. What it prints goes nowhere.

    Args:
        function: "package.module:function".
        arguments: JSON values.
        stall_seconds: a worker that neither takes nor sends a byte of a message for so long is given up.
    """

    def __init__(self, function: str, arguments: Sequence[Any], stall_seconds: float):
        self._function, self._arguments, self._stall_seconds = function, list(arguments), stall_seconds

    def watched(self) -> list[int]:
        """Descriptors that get readable when all workers have ended at once."""
        return []

    def start(self) -> Worker:
        """A worker, at once; it says when it is ready."""
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
        """Kill a worker, if it still runs, and what it started; how it ended. ``hung_up``: it is ending by itself.

        Raises:
            AllEnded: so it has, with all others.
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

    def begin_again(self) -> None:
        """After ``AllEnded``, and after ``how_all_ended`` said why."""
        raise AssertionError("workers of their own do not end together")

    def how_all_ended(self) -> tuple[str, str]:
        """How they ended, and what was said last."""
        raise AssertionError("workers of their own do not end together")

    def end_all(self, workers: Sequence[Worker], at_once: bool) -> None:
        """Kill all workers. ``at_once``: none has ever been ready, so nothing that takes long is waited for."""
        for worker in workers:
            self.end(worker, hung_up=False)

    def _connect(self) -> tuple[Connection, socket.socket]:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(self._stall_seconds), int(self._stall_seconds % 1 * 1e6))
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, limit)
        return Connection(ours.detach()), theirs


def open_log() -> IO[bytes]:
    """A file without a name for what a process writes: always at the end, so that it may be emptied at any time."""
    file = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed with the process
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_APPEND)
    return file


def last_words(log: IO[bytes], limit: int) -> str:
    """The end of what was written there."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - limit))
    return log.read().decode(errors="replace").strip()

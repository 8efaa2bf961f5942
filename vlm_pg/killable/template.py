"""Workers forked from a template process that has imported their modules, and the parent's side of that process.

torch takes 300 MB of private memory and seconds of start-up in every process that imports it. Forked workers share
that memory and start in milliseconds. The template is a fresh interpreter that never imports the user's main script
nor opens the user's files; it has one thread, so that forking it is safe.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vlm_pg.killable.pool import START_SECONDS, AllEnded, Starter, Worker, last_output, open_log
from vlm_pg.processes import (
    ONE_THREAD,
    ONE_THREAD_NO_GPU,
    PARENT_CHECK_MS,
    how_it_ended,
    outlive_signals,
    resolve,
    start_interpreter,
)

ANSWER_SECONDS = 60.0  # a kill is answered in milliseconds, unless the machine is swapping
_MESSAGE_BYTES = 64


class Template(Starter):
    """Starts the template process, which forks workers once it has imported ``modules``.

    ``gpu``: whether workers see this process's GPUs. For the other arguments see ``Starter``.
    """

    def __init__(
        self, modules: Sequence[str], function: str, arguments: Sequence[Any], stall_seconds: float, gpu: bool = False
    ):
        super().__init__(function, arguments, stall_seconds)
        self._modules, self._environment = list(modules), ONE_THREAD if gpu else ONE_THREAD_NO_GPU
        self.restart()

    def restart(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_SECONDS)
        self._stderr = open_log()
        with theirs:
            self._process = start_interpreter(
                f"{__name__}:main",
                [theirs.fileno(), os.getpid(), self._modules, self._function, self._arguments],
                self._stderr,
                self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                pass_fds=(theirs.fileno(),),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watched(self) -> list[int]:
        return [self._control.fileno()]

    def start(self) -> Worker:
        ours, theirs = self._connect()
        stderr = open_log()
        with theirs, suppress(OSError):  # it has ended: seen as a hang-up next
            socket.send_fds(self._control, [b"fork"], [theirs.fileno(), stderr.fileno()])
        return Worker(ours, stderr, end_by_seconds=time.monotonic() + START_SECONDS)

    def end(self, worker: Worker, hung_up: bool) -> str:
        """A hang-up always means that the process has ended; the exit status of one never ready is unknown."""
        worker.connection.close()  # ends one that is not known by its id yet
        if worker.pid is None:
            return ""
        try:
            self._control.send(f"end {worker.pid}".encode())
            return how_it_ended(int(self._control.recv(_MESSAGE_BYTES)))
        except (OSError, ValueError):
            raise AllEnded from None

    def how_all_ended(self) -> tuple[str, str]:
        try:
            how = how_it_ended(self._process.wait(ANSWER_SECONDS))
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        output = last_output(self._stderr, 2000)
        self.end_all((), at_once=False)
        return how, output

    def end_all(self, workers: Sequence[Worker], at_once: bool) -> None:
        """End the process and all its workers. ``at_once``: workers follow it as soon as they notice."""
        if at_once:
            self._process.kill()
        with suppress(OSError):
            self._control.send(b"close")
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        self._stderr.close()
        for worker in workers:
            worker.connection.close()


def main(descriptor: int, parent_pid: int, modules: Sequence[str], function: str, arguments: Sequence[Any]) -> None:
    """Fork workers until the parent hangs up or requests the end.

    Args:
        descriptor: this end of a socket pair.
        parent_pid: as the parent saw it.
        modules: imported before the first fork, outside of any deadline.
        function, arguments: called by a worker, after its descriptor and its parent's process id.
    """
    outlive_signals()
    gc.disable()  # none of what libraries make is garbage
    worker_main = resolve(function)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, every page of what is shared
    gc.enable()
    control = socket.socket(fileno=descriptor)
    control.settimeout(PARENT_CHECK_MS / 1000)
    pids: set[int] = set()
    try:
        while os.getppid() == parent_pid:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
            except TimeoutError:
                continue
            if message == b"fork":
                connection, stderr = descriptors
                pids |= _fork(control, connection, stderr, lambda *first: worker_main(*first, *arguments))
            elif message.startswith(b"end "):
                control.send(str(_end(int(message.split()[1]), pids)).encode())
            else:  # "close", or nothing more to come
                break
    finally:
        for pid in list(pids):
            _end(pid, pids)


def _fork(control: socket.socket, connection: int, stderr: int, serve: Callable[[int, int], None]) -> set[int]:
    """The id of a new worker; none if the system cannot fork, which the parent sees as a hang-up."""
    template_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.write(stderr, f"{error}\n".encode())
        return set()
    finally:
        if os.getpid() == template_pid:
            os.close(connection)
            os.close(stderr)
    if pid:
        return {pid}
    code = 1
    try:
        control.close()
        for descriptor in (1, 2):
            os.dup2(stderr, descriptor)
        os.close(stderr)
        serve(connection, template_pid)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # skips the template's own clean-up


def _end(pid: int, pids: set[int]) -> int:
    """Kill and reap a worker; its return code."""
    pids.remove(pid)
    os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the id is its own even if it has ended
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

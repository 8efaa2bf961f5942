"""The process that decoding workers are forked from, and the parent's side of it.

torch is 300 MB of private memory in every process that imports it, and seconds of start-up. Workers that are forked
from a process that has imported it share that memory, and are there in milliseconds. The template is a fresh
interpreter that never imports the user's main script and opens no file of the user's; it has one thread, so that
forking it is safe.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from vlm_pg.media import worker
from vlm_pg.processes import PARENT_CHECK_MS, how_it_ended, outlive_signals

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from vlm_pg.media.template import main; main({}, {}, {}, {})"
# numeric libraries read these at start-up, torch too: a worker is one thread
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ANSWER_SECONDS = 60.0  # a kill is answered in milliseconds, unless the machine is swapping
_MESSAGE_BYTES = 64


class Template:
    """Starts the template process; workers are asked of it at once, and come when it has imported ``modules``."""

    def __init__(self, modules: Sequence[str], memory_bytes: int):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_SECONDS)
        self.stderr: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # closed with the process
        code = _BOOT.format(theirs.fileno(), os.getpid(), tuple(modules), memory_bytes)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(Path(__file__).parents[2])],
            stdin=subprocess.DEVNULL,
            stdout=self.stderr,
            stderr=self.stderr,
            pass_fds=(theirs.fileno(),),
            env=dict(os.environ, CUDA_VISIBLE_DEVICES="", **dict.fromkeys(_ONE_THREAD, "1")),
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """For waiting: readable when the process has ended."""
        return self._control.fileno()

    def fork(self, connection: socket.socket, stderr: IO[bytes]) -> None:
        """Ask for a worker that serves ``connection``. It says its process id there when it is ready."""
        with suppress(OSError):  # it has ended: seen as a hang-up next
            socket.send_fds(self._control, [b"fork"], [connection.fileno(), stderr.fileno()])

    def end(self, pid: int) -> str | None:
        """Kill a worker if it still runs; how it ended, or None if this process has ended, and so all its workers."""
        try:
            self._control.send(f"end {pid}".encode())
            return how_it_ended(int(self._control.recv(_MESSAGE_BYTES)))
        except (OSError, ValueError):
            return None

    def close(self, at_once: bool = False) -> str:
        """End the process and all its workers; how it ended. ``at_once``: workers follow it as soon as they notice."""
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
        self.stderr.close()
        return how_it_ended(self._process.returncode)

    def wait(self) -> str:
        """How the process ended, once it hung up."""
        try:
            return how_it_ended(self._process.wait(ANSWER_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection"


def main(descriptor: int, parent_pid: int, modules: Sequence[str], memory_bytes: int) -> None:
    """Fork workers until the parent hangs up or says so.

    Args:
        descriptor: this end of a socket pair.
        parent_pid: process id of the parent, as the parent saw it.
        modules: imported before the first worker is forked, so that no call's deadline pays for it.
        memory_bytes: how much more memory a worker's calls may take; 0 for no limit.
    """
    outlive_signals()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, every page of what is shared
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
                pids |= _fork(control, connection, stderr, memory_bytes)
            elif message.startswith(b"end "):
                control.send(str(_end(int(message.split()[1]), pids)).encode())
            else:  # "close", or nothing more to come
                break
    finally:
        for pid in list(pids):
            _end(pid, pids)


def _fork(control: socket.socket, connection: int, stderr: int, memory_bytes: int) -> set[int]:
    """The id of a new worker; none if the system has no room for one, which is seen as a hang-up."""
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
        for place in (1, 2):
            os.dup2(stderr, place)
        os.close(stderr)
        worker.main(connection, template_pid, memory_bytes)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # nothing that the template was going to do at its end


def _end(pid: int, pids: set[int]) -> int:
    """Kill and reap a worker; its return code."""
    pids.remove(pid)
    os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the id is its own even if it has ended
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

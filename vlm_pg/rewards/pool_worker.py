"""The checking process: takes one task at a time from its parent and may be killed at any moment.

It is started as a fresh interpreter, never forked and never importing the user's main script, leads a process group of
its own, and ends when its parent ends, with all of that group. What goes to it and what comes back is JSON: nothing
that a model wrote is ever unpickled.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlm_pg.processes import end_with_parent, outlive_signals

MEGABYTE = 1 << 20


def main(descriptor: int, parent_pid: int, preload: Sequence[Sequence[Any]], memory_mb: int) -> None:
    """Serve tasks until the parent hangs up.

    Args:
        descriptor: the worker's end of a socket pair.
        parent_pid: process id of the parent, as the parent saw it.
        preload: calls (name, arguments) that run before the first task, so that no task's deadline or memory pays for
            what they import.
        memory_mb: address space a task may use beyond what the process has after that.
    """
    outlive_signals()
    os.set_inheritable(descriptor, False)  # a program that a task starts must not hold the parent's line open
    connection = Connection(descriptor)
    # The thread holds the connection open until this process ends: the parent reads how it ended at the hang-up.
    threading.Thread(target=end_with_parent, args=(connection, parent_pid), daemon=True).start()
    for name, arguments in preload:
        resolve(name)(*arguments)
    limited = _limit_memory(memory_mb)
    _write_nowhere()
    try:
        _send(connection, {"ready": True, "limited": limited})
        while True:
            task = json.loads(connection.recv_bytes())
            _send(connection, {"begun": True})  # a process that ends before this has cost no task
            _send(connection, _run(task))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent hung up


def resolve(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" names. Only names written in this package arrive here."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _run(task: dict[str, Any]) -> dict[str, Any]:
    """One task: its value, or what went wrong in words; and the seconds it took."""
    # Left at its default action: ends the process even while C code holds the interpreter's lock and nobody watches.
    signal.setitimer(signal.ITIMER_REAL, task["alarm_seconds"])
    started = time.perf_counter()
    answer: dict[str, Any]
    try:
        answer = {"value": resolve(task["task"])(*task["arguments"])}
        json.dumps(answer)  # inside the try: a value that is no JSON is the task's fault
    except MemoryError:
        # What filled the memory may still be held, and would cost the next task its value.
        answer = {"problem": "out of memory: it needs more than reward.checker.memory_mb", "used_up": True}
    except (Exception, SystemExit) as error:
        # A frame of a deep recursion tells nothing new; its end does.
        answer = {"problem": _named(error), "trace": traceback.format_exc()[-4000:]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return answer | {"seconds": time.perf_counter() - started}


def _named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _limit_memory(memory_mb: int) -> bool:
    """Hold the address space to what is in use plus ``memory_mb``; False where the system cannot."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit_bytes = pages * resource.getpagesize() + memory_mb * MEGABYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    except (ImportError, OSError, ValueError):
        return False
    return True


def _write_nowhere() -> None:
    """From here on standard error goes where standard output does: nowhere. A task may print without end."""
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())

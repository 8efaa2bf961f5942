"""A worker of a pool: takes one task at a time from its parent, and may be killed at any moment.

It ends with its parent, whatever it is doing: by the hang-up of the connection, by the change of its parent's id, and,
if C code holds the interpreter's lock, by a kernel alarm.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from vlm_pg.processes import end_with_parent, outlive_signals

# Messages of a worker. READY is followed by JSON (its process id, whether memory is limited), PARENT_CALL, DONE and
# USED_UP by bytes; after USED_UP it takes no further task.
READY, BEGUN, PARENT_CALL, DONE, USED_UP = b"ready", b"begun", b"parent call", b"done", b"used up"
# The worker's own alarm comes after the parent's deadline: it matters only when the parent is late or gone.
ALARM_FACTOR, ALARM_EXTRA_SECONDS = 1.5, 5.0
# The kernel's limit, and the line of /proc/self/status with the current use.
_LIMITS = {"private": (resource.RLIMIT_DATA, "VmData:"), "address space": (resource.RLIMIT_AS, "VmSize:")}


def serve(
    descriptor: int,
    parent_pid: int,
    deadline_seconds: float,
    prepare: Callable[[Connection], bool],
    run: Callable[[bytes], tuple[bytes, bool]],
) -> None:
    """Serve tasks until the other end hangs up.

    Args:
        descriptor: the worker's end of a socket pair.
        parent_pid: as the parent saw it.
        prepare: called before the first task, outside of any deadline; returns whether memory is limited.
        run: runs one task; returns its answer, and whether the process is used up.
    """
    outlive_signals()
    # a core dump would take gigabytes for each broken file
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.set_inheritable(descriptor, False)  # a program started by a task must not hold the connection open
    connection = Connection(descriptor)
    # The thread keeps the connection open until this process ends: at a hang-up the parent reads the exit status.
    threading.Thread(target=end_with_parent, args=(connection, parent_pid), daemon=True).start()
    limited = prepare(connection)
    try:
        connection.send_bytes(READY)
        connection.send_bytes(json.dumps([os.getpid(), limited]).encode())
        while True:
            message = connection.recv_bytes()
            connection.send_bytes(BEGUN)
            # left at its default action: ends the process even while C code holds the interpreter's lock
            signal.setitimer(signal.ITIMER_REAL, deadline_seconds * ALARM_FACTOR + ALARM_EXTRA_SECONDS)
            answer, is_used_up = run(message)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(USED_UP if is_used_up else DONE)
            connection.send_bytes(answer)
            del message, answer  # not held while the next one is taken
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the other end hung up


def limit_memory(what: Literal["private", "address space"], extra_bytes: int) -> None:
    """From now on this process gets ``extra_bytes`` more memory than it holds now; allocations beyond that fail.

    ``what``: "private" writable memory, in which mapped libraries (torch brings gigabytes) do not count, or all of the
    "address space".

    Raises:
        OSError, ValueError: this system cannot; only Linux can.
    """
    limit, _ = _LIMITS[what]
    wanted = held_bytes(what) + extra_bytes
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(limit, (wanted, wanted))


def held_bytes(what: Literal["private", "address space"]) -> int:
    """Current use under such a limit. Raises OSError where the system does not report it."""
    _, name = _LIMITS[what]
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

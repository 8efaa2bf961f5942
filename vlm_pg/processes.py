"""Worker processes that may be killed at any moment and never outlive their parent: what every kind of them shares."""

from __future__ import annotations

import os
import select
import signal
from multiprocessing.connection import Connection

PARENT_CHECK_MS = 1000


def end_with_parent(connection: Connection, parent_pid: int) -> None:
    """End this process at once when the parent is gone; runs in a thread of the worker.

    The parent is gone when its end of ``connection`` hangs up, or when this process gets another parent.
    """
    poll = select.poll()
    poll.register(connection, 0)  # hang-up and error are always reported
    while not poll.poll(PARENT_CHECK_MS) and os.getppid() == parent_pid:
        pass
    os._exit(0)


def how_it_ended(code: int) -> str:
    """A process's return code in words: "exit code 3", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"

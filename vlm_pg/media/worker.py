"""The decoding process: takes one call at a time from its parent and may be killed at any moment.

It is forked from a template (``template.py``). It ends when the process it works for ends, whatever it is doing: by the
hang-up of the pipe, by the change of its parent's id (the template ends, too), and, should a decoder hold the
interpreter's lock meanwhile, by an alarm that the kernel delivers.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection

from vlm_pg.media import parent
from vlm_pg.media.limits import limit_memory
from vlm_pg.processes import end_with_parent, outlive_signals

_TOO_MUCH = (
    "the frames do not fit into a decoding process's memory. What media.worker_memory_bytes allows is expected to do. "
    "Raise it, or lower media.max_frames or media.max_pixels."
)


def main(descriptor: int, parent_pid: int, memory_bytes: int) -> None:
    """Serve calls until the other end hangs up.

    Args:
        descriptor: the worker's end of a socket pair.
        parent_pid: process id of the parent, as the parent saw it.
        memory_bytes: how much more memory the calls may take; 0 for no limit.
    """
    outlive_signals()
    connection = Connection(descriptor)
    # The thread holds the connection open until this process ends: how it ended is asked for at the hang-up.
    threading.Thread(target=end_with_parent, args=(connection, parent_pid), daemon=True).start()
    if memory_bytes:
        limit_memory(memory_bytes)
    parent.connect(connection)
    try:
        connection.send(("ready", os.getpid()))
        while True:
            connection.send_bytes(_run(connection.recv_bytes()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the other end hung up


def _run(call: bytes) -> bytes:
    """One call; pickled, as ``parent.answer`` says."""
    function, args, limit_seconds = pickle.loads(call)
    # left at its default action: ends the process even while C code holds the interpreter's lock
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)
    try:
        return pickle.dumps(parent.answer(function, args))
    except MemoryError:
        return pickle.dumps(("bad_sample", ("out_of_memory", _TOO_MUCH, "")))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

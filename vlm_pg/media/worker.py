"""The decoding process: takes one call at a time from its parent and may be killed at any moment.

It is started as a fresh interpreter, never forked and never importing the user's main script. It ends when its parent
ends, whatever it is doing: by the hang-up of the pipe, by the change of its parent's id, and, should a decoder hold
the interpreter's lock meanwhile, by an alarm that the kernel delivers.
"""

from __future__ import annotations

import importlib
import pickle
import signal
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from vlm_pg.errors import SampleError
from vlm_pg.media.limits import limit_memory
from vlm_pg.processes import end_with_parent, outlive_signals

_TOO_MUCH = (
    "the frames do not fit into a decoding process's memory. What media.worker_memory_bytes allows is expected to do. "
    "Raise it, or lower media.max_frames or media.max_pixels."
)


def main(descriptor: int, parent_pid: int, modules: Sequence[str], memory_bytes: int) -> None:
    """Serve calls until the parent hangs up.

    Args:
        descriptor: the worker's end of a socket pair.
        parent_pid: process id of the parent, as the parent saw it.
        modules: imported before the first call, so that no call's deadline pays for it.
        memory_bytes: how much more memory the calls may take; 0 for no limit.
    """
    outlive_signals()
    connection = Connection(descriptor)
    # The thread holds the connection open until this process ends: the parent reads how it ended at the hang-up.
    threading.Thread(target=end_with_parent, args=(connection, parent_pid), daemon=True).start()
    for module in modules:
        importlib.import_module(module)
    if memory_bytes:
        limit_memory(memory_bytes)
    try:
        connection.send(("ready", None))
        while True:
            connection.send_bytes(_run(connection.recv_bytes()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent hung up


def _run(call: bytes) -> bytes:
    """One call; pickled: ``("done", value)``, ``("bad_sample", (reason, message, trace))`` or ``("failed", trace)``."""
    function, args, limit_seconds = pickle.loads(call)
    # left at its default action: ends the process even while C code holds the interpreter's lock
    signal.setitimer(signal.ITIMER_REAL, limit_seconds)
    try:
        return pickle.dumps(("done", function(*args)))
    except SampleError as error:
        answer: tuple[str, Any] = "bad_sample", (error.reason, str(error), error.trace)
    except MemoryError:
        answer = "bad_sample", ("out_of_memory", _TOO_MUCH, "")
    except Exception:  # a bug: carried to the parent, raised there
        answer = "failed", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return pickle.dumps(answer)

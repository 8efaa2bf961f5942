"""The checking process: takes one task at a time from its parent and may be killed at any moment.

What goes to it and what comes back is JSON: nothing that a model wrote is ever unpickled.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from vlm_pg.killable.worker import limit_memory, serve
from vlm_pg.processes import resolve

MEGABYTE = 1 << 20


def main(
    descriptor: int, parent_pid: int, deadline_seconds: float, preload: Sequence[Sequence[Any]], memory_mb: int
) -> None:
    """Serve tasks until the parent hangs up.

    Args:
        descriptor, parent_pid, deadline_seconds: as in ``serve``.
        preload: calls (name, arguments) that run before the first task, so that no task's deadline or memory pays for
            what they import.
        memory_mb: address space a task may use beyond what the process has after that.
    """

    def prepare(_connection: Connection) -> bool:
        for name, arguments in preload:
            resolve(name)(*arguments)
        try:
            limit_memory("address space", memory_mb * MEGABYTE)
        except (OSError, ValueError):
            return False
        finally:
            _write_nowhere()
        return True

    serve(descriptor, parent_pid, deadline_seconds, prepare, _run)


def _run(message: bytes) -> tuple[bytes, bool]:
    """One task: its value, or what went wrong in words; and the seconds it took."""
    function, arguments = json.loads(message)
    started = time.perf_counter()
    used_up = False
    answer: dict[str, Any]
    try:
        answer = {"value": resolve(function)(*arguments)}
        json.dumps(answer)  # inside the try: a value that is no JSON is the task's fault
    except MemoryError:
        # What filled the memory may still be held, and would cost the next task its value.
        answer = {"problem": "out of memory: it needs more than reward.checker.memory_mb"}
        used_up = True
    except (Exception, SystemExit) as error:
        # A frame of a deep recursion tells nothing new; its end does.
        answer = {"problem": _named(error), "trace": traceback.format_exc()[-4000:]}
    return json.dumps(answer | {"seconds": time.perf_counter() - started}).encode(), used_up


def _named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _write_nowhere() -> None:
    """From here on standard error goes where standard output does: nowhere. A task may print without end."""
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)

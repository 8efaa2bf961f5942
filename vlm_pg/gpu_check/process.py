"""A command with a limit on its time, whose end is the end of everything that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.processes import kill_group

# After the first signal, so that what holds a GPU or a file may let go of it.
GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``code``: as the system reports it, -N for signal N; None where its time was up."""

    code: int | None
    seconds: float


def run_limited(
    command: Sequence[str], log: Path, limit_seconds: float, environment: Mapping[str, str], folder: Path
) -> Ended:
    """Run ``command`` in ``folder``, its output appended to ``log``.

    Past ``limit_seconds`` it is ended with all its descendants, also those that lead a session of their own. So it is
    when this process is interrupted meanwhile.

    Raises:
        OSError: the program cannot be started.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(environment),
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(max(0.0, limit_seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return Ended(code, time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The command has ended and what it left in its group goes, too; or it is made to end."""
    if process.poll() is None:
        others = descendants(process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    kill_group(process.pid)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Children of ``pid``, their children and so on, where the system tells (/proc)."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state parent ...", and a name may hold brackets and spaces.
            parent = int(status.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (below := children.get(todo.pop(), []))
        found += below
    return found

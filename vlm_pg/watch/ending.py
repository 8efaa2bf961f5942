"""The end of a process whose run has no future, whatever its main thread is in the middle of."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Any

FLUSH_SECONDS = 1.0


class Ending:
    """Ends this process at a time that is set; ``name`` is known to all ranks of the run."""

    def __init__(self, name: str):
        self._name = name
        self._claim: Any = None
        self._changed = threading.Condition()
        self._line = ""
        self._at_seconds, self._code = 0.0, 0
        self._thread: threading.Thread | None = None

    def within(self, seconds: float, code: int, line: str = "") -> None:
        """End with this exit code in so many seconds, and say ``line`` then; in place of what was set before."""
        with self._changed:
            self._at_seconds, self._code, self._line = time.monotonic() + seconds, code, line
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="rank ending", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def say(self, line: str) -> None:
        """Print it, as the first process of this host that says anything; the others would only repeat it."""
        if self._claim is None and (claim := _claim(self._name)) is not None:
            self._claim = claim
            # Not through sys.stderr, whose lock may be held by a thread that hangs.
            os.write(2, f"vlm-pg: error: {line}\n".encode(errors="backslashreplace"))

    def _wait(self) -> None:
        with self._changed:
            while (left_seconds := self._at_seconds - time.monotonic()) > 0:
                self._changed.wait(left_seconds)
            if self._line:
                self.say(self._line)
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        os._exit(self._code)


def _claim(name: str) -> Any:
    """A name that one process of a host can hold, and that is free again when it ends; None if another one has it."""
    if sys.platform != "linux":  # elsewhere such names are files, which stay: each says it
        return name
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0vlm_pg/{name}")
    except OSError:
        claim.close()
        return None
    return claim


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()

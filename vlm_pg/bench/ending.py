"""Processes that measure or count, and end with the one that started them, whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

# prctl option of Linux (sys/prctl.h).
_PR_SET_PDEATHSIG = 1
_CHECK_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when ``parent``, which started it, ends, also by SIGTERM or SIGKILL.

    On Linux by the kernel; elsewhere a thread looks every second, which a fork by this process does not inherit.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    os._exit(1)

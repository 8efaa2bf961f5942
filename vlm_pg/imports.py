"""The first import of torch and transformers in a process."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_at_once() -> Iterator[None]:
    """Pause the garbage collector during a command's imports, and freeze the imported objects afterwards.

    Libraries create hundreds of thousands of objects; scanning them takes a sixth of the start. No effect if torch is
    imported already, since this process is then not a command's own. Nothing is frozen if torch is still to come: it
    would be little, and ``bench paper`` freezes everything itself during its counts.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if "torch" in sys.modules:
            gc.freeze()
            # Objects still frozen at exit count as leaked, which some libraries report.
            atexit.register(gc.unfreeze)
        gc.enable()

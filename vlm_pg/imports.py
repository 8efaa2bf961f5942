"""The first import of torch and transformers in a process."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_at_once() -> Iterator[None]:
    """Around the imports of a command: none of what they make is garbage.

    Libraries make hundreds of thousands of objects, among which the collector would look again and again, a sixth of
    what a start takes. It pauses here, and later collections leave out what is there at the end. Without effect once
    torch is imported: then this is no process of a command's own. Where torch is still to come nothing is left out: it
    would be little, and a count, which leaves out all for a while where nothing is left out yet, takes many times as
    long beside libraries.
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
            # What is still frozen at the end of the interpreter counts as leaked, which some libraries report.
            atexit.register(gc.unfreeze)
        gc.enable()

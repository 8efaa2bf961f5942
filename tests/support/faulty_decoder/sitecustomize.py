"""On the path of an interpreter, this lets FFmpeg's bindings do to some files what broken decoders do to broken ones.

The beginning of a file's name says what: "hang-1.mp4", "segfault-1.mp4", "abort-1.mp4", "memory-1.mp4". Odd numbers
hang in C code that holds the interpreter's lock, even ones in Python. What is taken of the memory is written to.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import av

_open = av.open
_CHUNK_BYTES = 16 << 20
# Without a limit a machine would be full: as much as no limit in a test allows.
_MOST_BYTES = 2 << 30


def faulty_open(file: Any, *arguments: Any, **options: Any) -> Any:
    """``av.open``, but for files of such names."""
    fault, _, rest = Path(str(file)).name.partition("-")
    if fault == "hang":
        is_odd = int(Path(rest).stem) % 2
        ctypes.PyDLL(None).sleep(86_400) if is_odd else time.sleep(86_400)
    elif fault == "segfault":
        ctypes.string_at(0)
    elif fault == "abort":
        os.abort()
    elif fault == "memory":
        taken = [bytearray(b"x") * _CHUNK_BYTES for _ in range(_MOST_BYTES // _CHUNK_BYTES)]
        raise RuntimeError(f"nothing limits the memory: {len(taken) * _CHUNK_BYTES} bytes were there")
    return _open(file, *arguments, **options)


av.open = faulty_open

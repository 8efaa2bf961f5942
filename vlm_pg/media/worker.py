"""The decoding process: takes one call at a time, as a pickle, from its parent and may be killed at any moment."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

from vlm_pg.cache import notes
from vlm_pg.killable.worker import held_bytes, limit_memory, serve
from vlm_pg.media import parent

_TOO_MUCH = (
    "the frames do not fit into a decoding process's memory. What media.worker_memory_bytes allows is expected to do. "
    "Raise it, or lower media.max_frames or media.max_pixels."
)
# A process that holds more than this share of its allowance after a file is replaced: what one file left, a decoder's
# leak for example, must not make the next one too large.
_MOST_LEFT = 0.25


def main(descriptor: int, parent_pid: int, deadline_seconds: float, memory_bytes: int) -> None:
    """Serve calls until the other end hangs up.

    Args:
        descriptor, parent_pid, deadline_seconds: as in ``serve``.
        memory_bytes: how much more memory the calls may take; 0 for no limit.
    """
    at_start = 0

    def prepare(connection: Connection) -> bool:
        nonlocal at_start
        if memory_bytes:
            at_start = held_bytes("private")
            limit_memory("private", memory_bytes)
        parent.connect(connection)
        notes.collect()
        return True

    def run(call: bytes) -> tuple[bytes, bool]:
        answer = _run(call)
        if not memory_bytes:
            return answer, False
        return answer, held_bytes("private") - at_start - len(answer) > _MOST_LEFT * memory_bytes

    serve(descriptor, parent_pid, deadline_seconds, prepare, run)


def _run(call: bytes) -> bytes:
    try:
        answer = parent.answered(call)
    except MemoryError:
        answer = pickle.dumps(("bad_sample", ("out_of_memory", _TOO_MUCH, "")))
    said = notes.collected()
    return pickle.dumps(("said", said)) + answer if said else answer

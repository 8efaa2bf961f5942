"""The decoding process: takes one call at a time, as a pickle, from its parent and may be killed at any moment."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

from vlm_pg.killable.worker import limit_memory, serve
from vlm_pg.media import parent

_TOO_MUCH = (
    "the frames do not fit into a decoding process's memory. What media.worker_memory_bytes allows is expected to do. "
    "Raise it, or lower media.max_frames or media.max_pixels."
)


def main(descriptor: int, parent_pid: int, deadline_seconds: float, memory_bytes: int) -> None:
    """Serve calls until the other end hangs up.

    Args:
        descriptor, parent_pid, deadline_seconds: as in ``serve``.
        memory_bytes: how much more memory the calls may take; 0 for no limit.
    """

    def prepare(connection: Connection) -> bool:
        if memory_bytes:
            limit_memory("private", memory_bytes)
        parent.connect(connection)
        return True

    serve(descriptor, parent_pid, deadline_seconds, prepare, _run)


def _run(call: bytes) -> tuple[bytes, bool]:
    try:
        return parent.answered(call), False
    except MemoryError:
        return pickle.dumps(("bad_sample", ("out_of_memory", _TOO_MUCH, ""))), False

"""The decoding process: one pickled call at a time, and requests to its parent, which may kill it at any moment."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from vlm_pg.cache import notes
from vlm_pg.errors import SampleError
from vlm_pg.killable.worker import PARENT_CALL, held_bytes, limit_memory, serve

T = TypeVar("T")
_TOO_MUCH = (
    "the frames do not fit into a decoding process's memory. What media.worker_memory_bytes allows is expected to do. "
    "Raise it, or lower media.max_frames or media.max_pixels."
)
# A process that holds more than this share of its allowance after a file, through a decoder's leak for example, is
# replaced: the next file needs the memory.
_MOST_LEFT = 0.25
# The connection to the parent, in a worker.
_parent: Connection | None = None


def main(descriptor: int, parent_pid: int, deadline_seconds: float, memory_bytes: int) -> None:
    """``serve`` calls, which may take ``memory_bytes`` more memory (0 for no limit), until the other end hangs up."""
    at_start = 0

    def prepare(connection: Connection) -> bool:
        nonlocal at_start
        global _parent
        if memory_bytes:
            at_start = held_bytes("private")
            limit_memory("private", memory_bytes)
        _parent = connection
        notes.collect()
        return True

    def run(call: bytes) -> tuple[bytes, bool]:
        try:
            answer = outcome_of(call)
        except MemoryError:
            answer = pickle.dumps(("bad_sample", ("out_of_memory", _TOO_MUCH, "")))
        if texts := notes.collected():
            answer = pickle.dumps(("warnings", texts)) + answer
        if not memory_bytes:
            return answer, False
        return answer, held_bytes("private") - at_start - len(answer) > _MOST_LEFT * memory_bytes

    serve(descriptor, parent_pid, deadline_seconds, prepare, run)


def call_in_parent(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, computed in the parent of a worker, which has imported qwen-vl-utils and torchvision, else
    here. It must be importable by name and pure, with hashable arguments: a worker caches answers.

    Raises:
        SampleError: as the function raised it.
        RuntimeError: the function raised something else; with its traceback.
    """
    return function(*args) if _parent is None else _call_parent(function, *args)


@lru_cache(maxsize=4096, typed=True)
def _call_parent(function: Callable[..., T], *args: Any) -> T:
    assert _parent is not None
    _parent.send_bytes(PARENT_CALL)
    _parent.send_bytes(pickle.dumps((function, args)))
    kind, value = _parent.recv()
    if kind == "bad_sample":
        raise SampleError(*value)
    if kind == "failed":
        raise RuntimeError(value)
    result: T = value
    return result


def outcome_of(call: bytes) -> bytes:
    """A pickled call's outcome, pickled.

    ``("done", value)``, ``("bad_sample", (reason, message, trace))`` or ``("failed", trace)``.

    Raises:
        MemoryError: as the call raised it.
    """
    function, args = pickle.loads(call)
    try:
        return pickle.dumps(("done", function(*args)))
    except SampleError as error:
        return pickle.dumps(("bad_sample", (error.reason, str(error), error.trace)))
    except MemoryError:
        raise
    except Exception:  # a bug, raised in the caller
        return pickle.dumps(("failed", traceback.format_exc()))

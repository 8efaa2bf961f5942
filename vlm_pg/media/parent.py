"""Questions a worker leaves to its parent, which has imported what they need: qwen-vl-utils, and torchvision."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from vlm_pg.errors import SampleError
from vlm_pg.killable.worker import ASKS

T = TypeVar("T")
_parent: Connection | None = None


def connect(connection: Connection) -> None:
    """From now on this process is a worker: ``ask`` asks at the other end of ``connection``."""
    global _parent
    _parent = connection


def ask(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, in the parent of a worker, else here; the function must be importable by name.

    It must depend on its arguments alone, which can be hashed: a worker remembers answers, and asks nothing twice.

    Raises:
        SampleError: as the function raised it.
        RuntimeError: the function raised something else; with its traceback.
    """
    return function(*args) if _parent is None else _asked(function, *args)


@lru_cache(maxsize=4096, typed=True)
def _asked(function: Callable[..., T], *args: Any) -> T:
    assert _parent is not None
    _parent.send_bytes(ASKS)
    _parent.send_bytes(pickle.dumps((function, args)))
    kind, value = _parent.recv()
    if kind == "bad_sample":
        raise SampleError(*value)
    if kind == "failed":
        raise RuntimeError(value)
    result: T = value
    return result


def answered(call: bytes) -> bytes:
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
    except Exception:  # a bug: raised where it was asked
        return pickle.dumps(("failed", traceback.format_exc()))

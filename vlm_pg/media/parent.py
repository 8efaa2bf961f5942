"""Questions a worker leaves to its parent, which has imported what they need: qwen-vl-utils, and torchvision."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from vlm_pg.errors import SampleError

T = TypeVar("T")
_parent: Connection | None = None


def connect(connection: Connection) -> None:
    """From now on this process is a worker: ``ask`` asks at the other end of ``connection``."""
    global _parent
    _parent = connection


def ask(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, in the parent of a worker, else here; the function must be importable by name.

    Raises:
        SampleError: as the function raised it.
        RuntimeError: the function raised something else; with its traceback.
    """
    if _parent is None:
        return function(*args)
    _parent.send_bytes(pickle.dumps(("asks", (function, args))))
    kind, value = _parent.recv()
    if kind == "bad_sample":
        raise SampleError(*value)
    if kind == "failed":
        raise RuntimeError(value)
    result: T = value
    return result


def answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """A call's outcome: ``("done", value)``, ``("bad_sample", (reason, message, trace))`` or ``("failed", trace)``.

    Raises:
        MemoryError: as the call raised it.
    """
    try:
        return "done", function(*args)
    except SampleError as error:
        return "bad_sample", (error.reason, str(error), error.trace)
    except MemoryError:
        raise
    except Exception:  # a bug: raised where it was asked
        return "failed", traceback.format_exc()

"""The boundary around every call into a decoder, where its errors become faults of the file.

Whatever a decoder raises on a file is that file's fault, unforeseen errors included. What our own code raises outside
of the boundary is a bug.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vlm_pg.errors import SampleError

TRACE_LIMIT = 4000


class DecodeFailure(Exception):
    """A file could not be read. ``trace``: the traceback of an unexpected error, else ""."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message)
        self.trace = trace


@contextmanager
def reading(
    expected: tuple[type[BaseException], ...], message_of: Callable[[BaseException], str] = str
) -> Iterator[None]:
    """Turn exceptions into DecodeFailure, with the traceback unless they are ``expected``: those have a useful message.

    Raises:
        DecodeFailure: for every error but our own refusals and
        MemoryError: the file needs more memory than there is.
    """
    try:
        yield
    except (DecodeFailure, SampleError, MemoryError):  # PyAV's error for "no memory" is a MemoryError too
        raise
    except Exception as error:
        if isinstance(error, expected):
            raise DecodeFailure(message_of(error).strip() or type(error).__name__) from error
        raise DecodeFailure(f"{type(error).__name__}: {error}", trace_of(error)) from error


def trace_of(error: BaseException) -> str:
    """The end of the traceback."""
    return "".join(traceback.format_exception(error))[-TRACE_LIMIT:]

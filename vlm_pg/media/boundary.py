"""The boundary around every call into a decoder, where its errors become faults of the file.

Whatever a decoder raises on a file is that file's fault, unforeseen errors included. What our own code raises outside
of the boundary is a bug.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from vlm_pg.errors import SampleError

Stage = Literal["open", "decode"]
TRACE_LIMIT = 4000


class DecodeFailure(Exception):
    """A file could not be read.

    ``stage``: "open" or "decode". ``trace``: the traceback of an unexpected error, else "".
    """

    def __init__(self, stage: Stage, message: str, trace: str = ""):
        super().__init__(message)
        self.stage = stage
        self.trace = trace


@contextmanager
def reading(
    stage: Stage, expected: tuple[type[BaseException], ...], words: Callable[[BaseException], str] = str
) -> Iterator[None]:
    """Turn exceptions into DecodeFailure.

    Args:
        stage: what is being done to the file.
        expected: errors with a useful message; others keep their traceback.
        words: the message of an expected error.

    Raises:
        DecodeFailure: for every error but our own refusals and
        MemoryError: the file asked for more memory than there is.
    """
    try:
        yield
    except (DecodeFailure, SampleError, MemoryError):  # PyAV's error for "no memory" is a MemoryError too
        raise
    except Exception as error:
        if isinstance(error, expected):
            raise DecodeFailure(stage, words(error).strip() or type(error).__name__) from error
        raise DecodeFailure(stage, f"{type(error).__name__}: {error}", trace_of(error)) from error


def trace_of(error: BaseException) -> str:
    """The end of the traceback."""
    return "".join(traceback.format_exception(error))[-TRACE_LIMIT:]

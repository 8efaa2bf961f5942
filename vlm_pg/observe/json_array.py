"""A JSON array in a file that can be read at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_OPEN, _BETWEEN, _CLOSE = b"[\n", b",\n", b"\n]\n"
# More than any item takes.
_TAIL_BYTES = 2**16


class ArrayFile:
    """A file that is a whole JSON array after every ``append``.

    A writer that is killed leaves a whole one but for a moment so short that it is hardly ever met: where a call's data
    lie on two pages of memory, the kernel may end the process between them. An array that is there already is gone on
    with; of one that was cut off (so, by a full disk or a power cut) the last event is lost. What is no array is moved
    to ``<name>.damaged``.
    """

    def __init__(self, path: Path):
        self._path = path
        self._end = _end_of_items(path)
        if self._end is None:
            path.rename(path.with_name(f"{path.name}.damaged"))
            self._end = 0
        if not self._end:
            # Under its name it is whole from the beginning.
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(_OPEN + _CLOSE)
            new.replace(path)
            self._end = len(_OPEN)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._write(_CLOSE, self._end)
        os.truncate(self._file, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        assert self._end is not None
        return self._end + len(_CLOSE)

    def append(self, items: Sequence[Any]) -> None:
        """Add items at the array's end; an error names the file."""
        if not items:
            return
        assert self._end is not None
        lines = _BETWEEN.join(json.dumps(item, separators=(",", ":")).encode() for item in items)
        lines = lines if self._end == len(_OPEN) else _BETWEEN + lines
        # One call, so that a process that is killed has made it or, within a page, not.
        self._write(lines + _CLOSE, self._end)
        self._end += len(lines)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes, place: int) -> None:
        try:
            while data:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written
        except OSError as error:
            error.filename = str(self._path)
            raise


def _end_of_items(path: Path) -> int | None:
    """Where the last item of the array in a file ends; 0 where nothing is there yet, None if it holds no array."""
    if not path.is_file() or not path.stat().st_size:
        return 0
    with path.open("rb") as file:
        if file.read(len(_OPEN)) != _OPEN:
            return None
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
    if tail.endswith(_CLOSE) and size > len(_OPEN + _CLOSE):
        return size - len(_CLOSE)
    last = tail.rfind(_BETWEEN)
    return start + last if last >= 0 else len(_OPEN)

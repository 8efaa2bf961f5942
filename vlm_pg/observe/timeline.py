"""The phases of all ranks on one time line: trace.json, which Perfetto and chrome://tracing open.

Every rank records its own phases. After each step rank 0 gathers and writes those that have ended: no other rank needs
the run's folder. A rank's times are its host's clock at process start plus elapsed time: ranks of several hosts align
as exactly as their clocks agree.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vlm_pg.distributed import RankLayout, gather_objects
from vlm_pg.observe.run_folder import RunFolder


class Slice(NamedTuple):
    """One phase of one rank. Microseconds are those since 1970; ``step``: 0 outside of steps."""

    name: str
    start_us: int
    end_us: int
    step: int


@dataclass
class Timeline:
    """What this process has done, and when; an observer of its phases.

    Args:
        megabytes: of the files, at most; 0 writes none. The same on all ranks.
    """

    ranks: RankLayout
    megabytes: int
    _file: _Rotating | None = None
    _opened: bool = False
    _step: int = 0
    _ended: list[Slice] = field(default_factory=list)
    _begun_us: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Slices must nest and none may go backwards, so the wall clock, which is set now and then, is asked once.
        self._origin_seconds = time.time() - time.perf_counter()

    def begun(self, name: str) -> None:
        self._begun_us.append(self._now_us())

    def ended(self, name: str) -> None:
        start_us = self._begun_us.pop()
        if self.megabytes:
            self._ended.append(Slice(name, start_us, self._now_us(), self._step))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around all that belongs to one step."""
        self._step = number
        self.begun("step")
        try:
            yield
        finally:
            self.ended("step")
            self._step = 0

    def open(self, folder: RunFolder) -> None:
        """From here on there is a file to hand in to. A collective."""
        if not self.megabytes:
            return
        hosts = gather_objects(socket.gethostname())
        self._opened = True
        if self.ranks.is_first:
            self._file = _Rotating(folder, self.megabytes * 2**20 // 2, _names(hosts))

    def hand_in(self) -> None:
        """Write what all ranks have ended since the last time. A collective."""
        if not self._opened:
            return
        of_ranks = gather_objects(self._take())
        if self._file is not None:
            self._file.append(_events(of_ranks))

    def close(self) -> None:
        """No collective, for the others may be gone: of what was not handed in only rank 0's is written."""
        if self._file is not None:
            with suppress(OSError):  # the run has ended, and what ended it is told
                self._file.append(_events([self._take()]))
                self._file.close()
            self._file = None

    def _take(self) -> list[Slice]:
        ended, self._ended = self._ended, []
        return ended

    def _now_us(self) -> int:
        return round((self._origin_seconds + time.perf_counter()) * 1e6)


def _names(hosts: Sequence[str]) -> list[dict[str, Any]]:
    """What rows are called, in the order of ranks."""
    events = []
    for rank, host in enumerate(hosts):
        around = {"ph": "M", "pid": rank, "tid": 0}
        events += [
            {"name": "process_name", **around, "args": {"name": f"rank {rank} ({host})"}},
            {"name": "process_sort_index", **around, "args": {"sort_index": rank}},
            {"name": "thread_name", **around, "args": {"name": "phases"}},
        ]
    return events


def _events(of_ranks: Iterable[Sequence[Slice]]) -> list[dict[str, Any]]:
    """Complete events of the Trace Event Format."""
    return [
        {
            "name": item.name,
            "ph": "X",
            "ts": item.start_us,
            "dur": item.end_us - item.start_us,
            "pid": rank,
            "tid": 0,
            "args": {"step": item.step} if item.step else {},
        }
        for rank, of_rank in enumerate(of_ranks)
        for item in of_rank
    ]


class _Rotating:
    """trace.json; beyond ``most_bytes`` it becomes trace.before.json, in the place of an earlier one.

    Args:
        names: events that every file begins with.
    """

    def __init__(self, folder: RunFolder, most_bytes: int, names: Sequence[dict[str, Any]]):
        self._folder, self._most_bytes, self._names = folder, most_bytes, names
        self._file = ArrayFile(folder.trace)
        # Again after a resume: ranks may be on other hosts.
        self._file.append(names)

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        self._file.append(events)
        if self._file.num_bytes > self._most_bytes:
            self._file.close()
            self._folder.trace.replace(self._folder.trace_before)
            self._file = ArrayFile(self._folder.trace)
            self._file.append(self._names)

    def close(self) -> None:
        self._file.close()


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

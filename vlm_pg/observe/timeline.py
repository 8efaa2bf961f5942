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
    """One phase of one rank. Times in microseconds since 1970; ``step`` is 0 outside of steps."""

    name: str
    start_us: int
    end_us: int
    step: int


@dataclass
class Timeline:
    """Records this process's phases, as an observer of ``Phases``, and writes those of all ranks.

    Args:
        megabytes: of the files, at most; 0 writes none. The same on all ranks.
    """

    ranks: RankLayout
    megabytes: int
    _folder: RunFolder | None = None
    _file: ArrayFile | None = None
    _rank_names: list[dict[str, Any]] = field(default_factory=list)
    _step: int = 0
    _ended: list[Slice] = field(default_factory=list)
    _begun_us: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Slices must nest and never go backwards, so the wall clock, which may be adjusted, is read once.
        self._origin_seconds = time.time() - time.perf_counter()

    def begun(self, name: str) -> None:
        self._begun_us.append(self._now_us())

    def ended(self, name: str) -> None:
        start_us = self._begun_us.pop()
        if self.megabytes:
            self._ended.append(Slice(name, start_us, self._now_us(), self._step))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around everything that belongs to one step."""
        self._step = number
        self.begun("step")
        try:
            yield
        finally:
            self.ended("step")
            self._step = 0

    def open(self, folder: RunFolder) -> None:
        """Open the file on rank 0. A collective."""
        if not self.megabytes:
            return
        self._folder = folder
        for rank, host in enumerate(gather_objects(socket.gethostname())):
            common = {"ph": "M", "pid": rank, "tid": 0}
            self._rank_names += [
                {"name": "process_name", **common, "args": {"name": f"rank {rank} ({host})"}},
                {"name": "process_sort_index", **common, "args": {"sort_index": rank}},
                {"name": "thread_name", **common, "args": {"name": "phases"}},
            ]
        if self.ranks.is_rank0:
            # Names again after a resume: ranks may be on other hosts.
            self._file = ArrayFile(folder.trace)
            self._file.append(self._rank_names)

    def flush(self) -> None:
        """Write the phases of all ranks that ended since the last call. A collective."""
        if self._folder is not None:
            self._append(gather_objects(self._take()))

    def close(self) -> None:
        """Write rank 0's remaining phases. No collective, for other ranks may be gone."""
        if self._file is not None:
            with suppress(OSError):  # the run has ended, and its error is printed
                self._append([self._take()])
                self._file.close()
            self._file = None

    def _take(self) -> list[Slice]:
        ended, self._ended = self._ended, []
        return ended

    def _now_us(self) -> int:
        return round((self._origin_seconds + time.perf_counter()) * 1e6)

    def _append(self, of_ranks: Iterable[Sequence[Slice]]) -> None:
        """Append complete events of the Trace Event Format; a file of half the bytes replaces trace.before.json."""
        if self._file is None or self._folder is None:
            return
        self._file.append(
            [
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
        )
        if self._file.num_bytes > self.megabytes * 2**20 // 2:
            self._file.close()
            self._folder.trace.replace(self._folder.trace_before)
            self._file = ArrayFile(self._folder.trace)
            self._file.append(self._rank_names)


_OPEN, _BETWEEN, _CLOSE = b"[\n", b",\n", b"\n]\n"


class ArrayFile:
    """A file that is a complete JSON array after every ``append``.

    A killed writer leaves a complete array, except for the rare case that the kernel ends the process between two
    memory pages of one write. An existing array is continued. Anything else, also a file that was cut (by that, a full
    disk or a power cut), is moved to ``<name>.damaged``.
    """

    def __init__(self, path: Path):
        self._path = path
        if path.is_file() and not _is_array(path):
            path.rename(path.with_name(f"{path.name}.damaged"))
        if not path.exists():
            # Under its name it is complete from the start.
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(_OPEN + _CLOSE)
            new.replace(path)
        self.num_bytes = path.stat().st_size
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def append(self, items: Sequence[Any]) -> None:
        """Add items at the array's end; an error names the file."""
        if not items:
            return
        end = self.num_bytes - len(_CLOSE)
        lines = _BETWEEN.join(json.dumps(item, separators=(",", ":")).encode() for item in items)
        # One call, so that a killed process has made it or, within a page, not.
        self._write((b"" if end == len(_OPEN) else _BETWEEN) + lines + _CLOSE, end)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            error.filename = str(self._path)
            raise
        self.num_bytes = offset


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        is_begun = file.read(len(_OPEN)) == _OPEN
        file.seek(max(len(_OPEN), path.stat().st_size - len(_CLOSE)))
        return is_begun and file.read() == _CLOSE

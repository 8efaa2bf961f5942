"""The phases of all ranks on one time line: trace.json, which Perfetto and chrome://tracing open.

Every rank notes its own phases. After each step the ranks hand in what has ended since, and rank 0 writes it: no other
rank needs the run's folder. A rank's times are its host's clock at the start of the process plus what has gone by
since, so ranks of several hosts stand beside each other as exactly as their clocks agree.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vlm_pg.distributed import RankLayout, gather_objects
from vlm_pg.observe.json_array import ArrayFile
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

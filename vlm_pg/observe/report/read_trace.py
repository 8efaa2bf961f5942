"""The last steps of a run's time line, read from the end of trace.json.

A line is an event. The run may be writing the file at this moment, and may have been killed at any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.markup import dict_at, number_or_none
from vlm_pg.observe.report.read import is_step
from vlm_pg.observe.text import one_line

# Of the end of the file: some steps of a thousand ranks.
_READ_BYTES = 16 * 2**20
# Names of rows stand at the beginning.
_HEAD_BYTES = 2**20
_MAX_NAME_CHARACTERS = 40
_RANK_NAME = re.compile(r"rank \d+ \((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Slice:
    """A phase of one rank; microseconds since 1970."""

    name: str
    rank: int
    step: int
    start_us: float
    end_us: float


@dataclass
class Trace:
    """``slices``: all that were read, in the order of the file. ``hosts``: by rank."""

    slices: list[Slice] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)


def read_trace(path: Path) -> Trace:
    """The end of the file; lines that are no events of a run are left out. Raises OSError."""
    trace = Trace()
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _READ_BYTES)
        file.seek(start)
        tail = file.read(_READ_BYTES)
    if start:
        tail = tail[tail.find(b"\n") + 1 :]
        for event in _events(head):
            _add_host(trace, event)
    for event in _events(tail):
        _add_host(trace, event)
        found = _slice(event)
        if found is not None:
            trace.slices.append(found)
    return trace


def _events(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.split(b"\n"):
        event = parse_json_line(line.removesuffix(b","))
        if event is not None:
            yield event


def _add_host(trace: Trace, event: dict[str, Any]) -> None:
    name = dict_at(event, "args").get("name")
    if event.get("name") == "process_name" and is_step(event.get("pid")) and isinstance(name, str):
        found = _RANK_NAME.fullmatch(name)
        if found:
            trace.hosts[event["pid"]] = one_line(found[1], _MAX_NAME_CHARACTERS)


def _slice(event: dict[str, Any]) -> Slice | None:
    start, length = number_or_none(event.get("ts")), number_or_none(event.get("dur"))
    rank, step, name = event.get("pid"), dict_at(event, "args").get("step"), event.get("name")
    if event.get("ph") != "X" or start is None or length is None or length < 0 or not isinstance(name, str):
        return None
    if not is_step(rank) or not is_step(step):
        return None
    return Slice(one_line(name, _MAX_NAME_CHARACTERS), rank, step, start, start + length)

"""The last steps as a picture: a bar per rank, in the colours of its phases, read from the end of trace.json."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.charts import nice_ticks
from vlm_pg.observe.report.markup import dict_at, duration, number, number_or_none, percent
from vlm_pg.observe.report.read import RunData, is_step
from vlm_pg.observe.text import one_line

# Name and CSS class, in the order of a run.
PHASES = {
    "setup": ("set-up", "p0"),
    "eval_before": ("evaluation before", "p1"),
    "prompts": ("media and prompts", "p2"),
    "vision": ("vision tower", "p3"),
    "rollout": ("generating rollouts", "p4"),
    "rewards": ("rewards", "p5"),
    "reference": ("reference for the KL", "p6"),
    "train": ("policy update", "p7"),
    "logs": ("logs", "p8"),
    "checkpoint": ("checkpoints", "p9"),
    "eval": ("evaluation in between", "p10"),
    "eval_after": ("evaluation after", "p10"),
    "idle": ("waiting for other ranks", "idle"),
}
_OTHER = "p11"


def name_of(phase: str) -> str:
    """Its name in the report."""
    return PHASES[phase][0] if phase in PHASES else phase.replace("_", " ")


def color_of(phase: str) -> str:
    """Its CSS class."""
    return PHASES[phase][1] if phase in PHASES else _OTHER


WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 84, 8, 22, 26
MAX_STEPS, MAX_ROWS, MAX_SLICES = 5, 64, 4000
# Narrower ones cannot be seen.
_MIN_WIDTH = 0.3
# A longer pause between two steps, as a share of the later one, is where the run was resumed.
_MAX_PAUSE = 0.5
_STEP = "step"


def timeline_view(run: RunData) -> dict[str, Any]:
    """The values of the timeline; ``missing``: why there is none."""
    path = run.folder.trace
    if not path.exists():
        return {"missing": f"{path.name} is not there: when each rank was in which phase was not written."}
    try:
        trace = read_trace(path)
    except OSError as error:
        return {"missing": f"{path.name} cannot be read: {error}"}
    steps = _last_steps(trace)
    if not steps:
        return {"missing": f"{path.name} holds no whole step yet."}
    return _picture(trace, steps)


def _last_steps(trace: Trace) -> list[Slice]:
    """The last consecutive whole steps of the first rank, as many as can be told apart."""
    whole = [item for item in trace.slices if item.name == _STEP]
    first = min((item.rank for item in whole), default=0)
    found: list[Slice] = []
    for item in reversed([item for item in whole if item.rank == first]):
        if found:
            later = found[-1]
            pause = later.start_us - item.end_us
            if item.step >= later.step or pause > _MAX_PAUSE * (later.end_us - later.start_us):
                break
        found.append(item)
        if len(found) == MAX_STEPS:
            break
    while len(found) > 1 and len(_within(trace, found)) > MAX_SLICES:
        found.pop()
    return found[::-1]


def _within(trace: Trace, steps: Sequence[Slice]) -> list[Slice]:
    """All ranks' slices of these steps, without those of the same steps before a resume."""
    numbers = {item.step for item in steps}
    start, end = min(item.start_us for item in steps), max(item.end_us for item in steps)
    early, late = start - (end - start), end + (end - start)
    return [item for item in trace.slices if item.step in numbers and item.start_us >= early and item.end_us <= late]


def _picture(trace: Trace, steps: Sequence[Slice]) -> dict[str, Any]:
    slices = _within(trace, steps)
    every_rank = sorted({item.rank for item in slices})
    ranks = every_rank
    if len(every_rank) > MAX_ROWS:  # evenly over all of them: neighbours are on one host
        ranks = [every_rank[i * len(every_rank) // MAX_ROWS] for i in range(MAX_ROWS)]
    start, end = min(item.start_us for item in slices), max(item.end_us for item in slices)
    seconds = max(1e-6, (end - start) / 1e6)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    height = max(9.0, min(26.0, 480 / len(ranks)))
    tops = {rank: TOP + index * (height + 2) for index, rank in enumerate(ranks)}
    labelled = ranks[:: max(1, round(14 / (height + 2)))]
    found = {item.name for item in slices} - {_STEP}
    names = [name for name in PHASES if name in found] + sorted(found - set(PHASES))

    def x(time_us: float) -> float:
        return LEFT + (time_us - start) / 1e6 * scale

    return {
        "missing": "",
        "lead": _in_words(steps, every_rank, len(ranks), slices),
        "width": WIDTH,
        "height": TOP + len(ranks) * (height + 2) + BOTTOM,
        "left": LEFT,
        "bar": height - 1,
        "bottom": TOP + len(ranks) * (height + 2),
        "rows": [(tops[rank] + height / 2 + 4, f"rank {rank}") for rank in labelled],
        "bars": [
            (color_of(item.name), x(item.start_us), tops[item.rank], width, _words(item, trace))
            # A nested slice comes after the one around it.
            for item in sorted(slices, key=lambda item: (item.start_us, -item.end_us))
            if item.rank in tops and (width := (item.end_us - item.start_us) / 1e6 * scale) >= _MIN_WIDTH
            if item.name != _STEP
        ],
        "spans": [
            (x(item.start_us), tops[item.rank], (item.end_us - item.start_us) / 1e6 * scale)
            for item in slices
            if item.name == _STEP and item.rank in tops
        ],
        "steps": [
            (x(item.start_us), f"step {item.step:,}" if x(item.end_us) - x(item.start_us) > 70 else "")
            for item in steps
        ],
        "ticks": [(LEFT + tick * scale, f"{number(tick)} s") for tick in nice_ticks(0, seconds, 8) if tick <= seconds],
        "legend": [(name_of(name), color_of(name)) for name in names],
    }


def _words(item: Slice, trace: Trace) -> str:
    host = f" ({trace.hosts[item.rank]})" if item.rank in trace.hosts else ""
    seconds = (item.end_us - item.start_us) / 1e6
    return f"rank {item.rank}{host}, step {item.step:,}: {name_of(item.name)}, {number(seconds)} s"


def _in_words(steps: Sequence[Slice], ranks: Sequence[int], shown: int, slices: Sequence[Slice]) -> str:
    first, last = steps[0].step, steps[-1].step
    words = f"Step {first:,}" if first == last else f"Steps {first:,} to {last:,}"
    length = duration(sum(item.end_us - item.start_us for item in steps) / 1e6)
    words += f", {length}; all of the run is in trace.json, for ui.perfetto.dev."
    if shown < len(ranks):
        words += f" {shown} of {len(ranks):,} ranks are drawn."
    if len(ranks) > 1:
        idle = dict.fromkeys(ranks, 0.0)
        total = dict.fromkeys(ranks, 0.0)
        for item in slices:
            if item.name in ("idle", _STEP):
                (idle if item.name == "idle" else total)[item.rank] += item.end_us - item.start_us
        share = sum(idle.values()) / max(1.0, sum(total.values()))
        least = min(ranks, key=lambda rank: idle[rank])
        words += f" Ranks waited for each other {percent(share)} of the time, rank {least} least."
    return words


# Of the file's end: some steps of a thousand ranks.
_READ_BYTES = 16 * 2**20
# Rank names are at the file's start.
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
    """``slices`` in the order of the file; ``hosts`` by rank."""

    slices: list[Slice] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)


def read_trace(path: Path) -> Trace:
    """Read the file's end; lines that are no events of a run are skipped. Raises OSError."""
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

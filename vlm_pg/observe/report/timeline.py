"""The last steps as a picture: a bar per rank, in the colours of its phases, read from the end of trace.json."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.charts import nice_ticks
from vlm_pg.observe.report.markup import duration, number, percent
from vlm_pg.observe.report.read import RunData
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
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 84, 8, 22, 26
MAX_STEPS, MAX_ROWS, MAX_SLICES = 5, 64, 4000
# Narrower ones cannot be seen.
_MIN_WIDTH = 0.3
# A longer pause between two steps, as a share of the later one, is where the run was resumed.
_MAX_PAUSE = 0.5
# Of the file's end: some steps of a thousand ranks.
_READ_BYTES = 16 * 2**20
# Rank names are at the file's start.
_HEAD_BYTES = 2**20
_MAX_NAME_CHARACTERS = 40
_RANK_NAME = re.compile(r"rank \d+ \((.*)\)", re.DOTALL)


class Slice(NamedTuple):
    """A phase of one rank; microseconds since 1970."""

    name: str
    rank: int
    step: int
    start_us: float
    end_us: float

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / 1e6


class Trace(NamedTuple):
    """``slices`` in the order of the file; ``hosts`` by rank."""

    slices: list[Slice]
    hosts: dict[int, str]


def phase_style(phase: str) -> tuple[str, str]:
    """Name in the report, and CSS class."""
    return PHASES.get(phase, (phase.replace("_", " "), "p11"))


def in_order(phases: set[str]) -> list[str]:
    """Phases in the order of a run, unknown ones last."""
    return [name for name in PHASES if name in phases] + sorted(phases - set(PHASES))


def timeline_view(run: RunData) -> dict[str, Any]:
    """The values of the timeline; ``missing``: why there is none."""
    path = run.folder.trace
    if not path.exists():
        return {"missing": f"{path.name} is not there: when each rank was in which phase was not written."}
    try:
        trace = read_trace(path)
    except OSError as error:
        return {"missing": f"{path.name} cannot be read: {error}"}
    steps = _last_steps(trace.slices)
    return _picture(trace, steps) if steps else {"missing": f"{path.name} holds no whole step yet."}


def _last_steps(slices: Sequence[Slice]) -> list[Slice]:
    """The last consecutive whole steps of the first rank, as many as can be distinguished."""
    whole = [item for item in slices if item.name == "step"]
    first_rank = min((item.rank for item in whole), default=0)
    steps: list[Slice] = []
    for item in reversed([item for item in whole if item.rank == first_rank]):
        if steps:
            later = steps[-1]
            pause = later.start_us - item.end_us
            if item.step >= later.step or pause > _MAX_PAUSE * (later.end_us - later.start_us):
                break
        steps.append(item)
        if len(steps) == MAX_STEPS:
            break
    while len(steps) > 1 and len(_within(slices, steps)) > MAX_SLICES:
        steps.pop()
    return steps[::-1]


def _within(slices: Sequence[Slice], steps: Sequence[Slice]) -> list[Slice]:
    """All ranks' slices of these steps, without those of the same steps before a resume."""
    numbers = {item.step for item in steps}
    start, end = min(item.start_us for item in steps), max(item.end_us for item in steps)
    early, late = start - (end - start), end + (end - start)
    return [item for item in slices if item.step in numbers and item.start_us >= early and item.end_us <= late]


def _picture(trace: Trace, steps: Sequence[Slice]) -> dict[str, Any]:
    slices = _within(trace.slices, steps)
    every_rank = sorted({item.rank for item in slices})
    ranks = every_rank
    if len(every_rank) > MAX_ROWS:  # evenly over all of them: neighbours are on one host
        ranks = [every_rank[i * len(every_rank) // MAX_ROWS] for i in range(MAX_ROWS)]
    start, end = min(item.start_us for item in slices), max(item.end_us for item in slices)
    seconds = max(1e-6, (end - start) / 1e6)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    height = max(9.0, min(26.0, 480 / len(ranks)))
    tops = {rank: TOP + index * (height + 2) for index, rank in enumerate(ranks)}
    bottom = TOP + len(ranks) * (height + 2)
    phases = in_order({item.name for item in slices} - {"step"})

    def x(time_us: float) -> float:
        return LEFT + (time_us - start) / 1e6 * scale

    bars, spans = [], []
    # A nested slice comes after the one around it.
    for item in sorted(slices, key=lambda item: (item.start_us, -item.end_us)):
        width = item.seconds * scale
        if item.rank in tops and item.name == "step":
            spans.append((x(item.start_us), tops[item.rank], width))
        elif item.rank in tops and width >= _MIN_WIDTH:
            name, color = phase_style(item.name)
            host = f" ({trace.hosts[item.rank]})" if item.rank in trace.hosts else ""
            words = f"rank {item.rank}{host}, step {item.step:,}: {name}, {number(item.seconds)} s"
            bars.append((color, x(item.start_us), tops[item.rank], width, words))
    return {
        "missing": "",
        "lead": _in_words(steps, every_rank, len(ranks), slices),
        "width": WIDTH,
        "height": bottom + BOTTOM,
        "left": LEFT,
        "bar": height - 1,
        "bottom": bottom,
        "rows": [(tops[rank] + height / 2 + 4, f"rank {rank}") for rank in ranks[:: max(1, round(14 / (height + 2)))]],
        "bars": bars,
        "spans": spans,
        "steps": [(x(item.start_us), f"step {item.step:,}" if item.seconds * scale > 70 else "") for item in steps],
        "ticks": [(LEFT + tick * scale, f"{number(tick)} s") for tick in nice_ticks(0, seconds, 8) if tick <= seconds],
        "legend": [phase_style(name) for name in phases],
    }


def _in_words(steps: Sequence[Slice], ranks: Sequence[int], num_drawn: int, slices: Sequence[Slice]) -> str:
    first, last = steps[0].step, steps[-1].step
    words = f"Step {first:,}" if first == last else f"Steps {first:,} to {last:,}"
    length = duration(sum(item.end_us - item.start_us for item in steps) / 1e6)
    words += f", {length}; all of the run is in trace.json, for ui.perfetto.dev."
    if num_drawn < len(ranks):
        words += f" {num_drawn} of {len(ranks):,} ranks are drawn."
    if len(ranks) > 1:
        idle, total = Counter[int](), Counter[int]()
        for item in slices:
            if item.name in ("idle", "step"):
                (idle if item.name == "idle" else total)[item.rank] += round(item.end_us - item.start_us)
        share = idle.total() / max(1.0, total.total())
        least = min(ranks, key=lambda rank: idle[rank])
        words += f" Ranks waited for each other {percent(share)} of the time, rank {least} least."
    return words


def read_trace(path: Path) -> Trace:
    """Read the file's end; lines that are no events of a run are skipped. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        start = max(0, file.seek(0, os.SEEK_END) - _READ_BYTES)
        file.seek(start)
        tail = file.read(_READ_BYTES)
    # Behind the start of the file the first line is cut, and rank names are missing.
    tail = tail[tail.find(b"\n") + 1 :] if start else tail
    trace = Trace([], {})
    for part in (head, tail) if start else (tail,):
        for line in part.split(b"\n"):
            event = parse_json_line(line.removesuffix(b",")) or {}
            try:
                rank, name, arguments = event["pid"], event["name"], event["args"]
                if name == "process_name" and (found := _RANK_NAME.fullmatch(arguments["name"])):
                    trace.hosts[rank] = one_line(found[1], _MAX_NAME_CHARACTERS)
                elif part is tail and event["ph"] == "X":
                    start_us, name = event["ts"], one_line(name, _MAX_NAME_CHARACTERS)
                    trace.slices.append(Slice(name, rank, arguments["step"], start_us, start_us + event["dur"]))
            except (KeyError, TypeError):
                continue  # no event of a run, or a phase outside of the steps
    return trace

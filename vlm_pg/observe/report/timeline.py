"""A picture of the last steps: a bar for each rank, in the colours of its phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_pg.observe.report.charts import nice_ticks
from vlm_pg.observe.report.markup import duration, number, percent
from vlm_pg.observe.report.phases import PHASES, color_of, name_of
from vlm_pg.observe.report.read import RunData
from vlm_pg.observe.report.read_trace import Slice, Trace, read_trace

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 84, 8, 22, 26
MAX_STEPS, MAX_ROWS, MAX_SLICES = 5, 64, 4000
# Narrower ones cannot be seen.
_MIN_WIDTH = 0.3
# A longer pause between two steps, as a share of the later one, is where the run was resumed.
_MAX_PAUSE = 0.5
_STEP = "step"


def timeline_view(run: RunData) -> dict[str, Any]:
    """What ``timeline.html`` draws; ``missing`` says why there is nothing."""
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
    """The last whole steps of the first rank that stand in one row, as many as can be told apart."""
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
    """All ranks' slices of these steps; of the present start of the run, for a step may have been made before."""
    numbers = {item.step for item in steps}
    start, end = min(item.start_us for item in steps), max(item.end_us for item in steps)
    early, late = start - (end - start), end + (end - start)
    return [item for item in trace.slices if item.step in numbers and item.start_us >= early and item.end_us <= late]


def _picture(trace: Trace, steps: Sequence[Slice]) -> dict[str, Any]:
    slices = _within(trace, steps)
    every_rank = sorted({item.rank for item in slices})
    # Evenly over all of them: neighbours are of one host.
    rows = [every_rank[i * len(every_rank) // MAX_ROWS] for i in range(MAX_ROWS)]
    ranks = every_rank if len(every_rank) <= MAX_ROWS else rows
    start, end = min(item.start_us for item in slices), max(item.end_us for item in slices)
    seconds = max(1e-6, (end - start) / 1e6)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    height = max(9.0, min(26.0, 480 / len(ranks)))
    tops = {rank: TOP + place * (height + 2) for place, rank in enumerate(ranks)}

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
        "rows": [(tops[rank] + height / 2 + 4, f"rank {rank}") for rank in _labelled(ranks, height)],
        "bars": [
            (color_of(item.name), x(item.start_us), tops[item.rank], width, _words(item, trace))
            # What lies within another one comes after it.
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
        "legend": [(name_of(name), color_of(name)) for name in _in_order({item.name for item in slices} - {_STEP})],
    }


def _in_order(names: set[str]) -> list[str]:
    return [name for name in PHASES if name in names] + sorted(names - set(PHASES))


def _labelled(ranks: Sequence[int], height: float) -> Sequence[int]:
    """Labels need some height."""
    return ranks[:: max(1, round(14 / (height + 2)))]


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

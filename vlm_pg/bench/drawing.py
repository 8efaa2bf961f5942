"""Figures of what was measured: of a step speed-up, its bound and peak memory, of generation the same by lengths."""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB

# Told apart by lightness too, not by hue alone (Okabe and Ito's palette).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GRID = "#222222", "#dddddd"
PANEL_WIDTH, PANEL_HEIGHT, BARS_HEIGHT, HEAD_HEIGHT = 3.8, 2.9, 3.4, 0.85  # inches
BAR_POINTS = 6
# Letters stay letters, and equal numbers give an equal file.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "vlm_pg", "font.family": "sans-serif", "font.size": 9}
STYLE |= {"axes.titlesize": 9, "axes.titleweight": "bold", "text.color": INK, "legend.frameon": False}
STYLE |= {"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "axes.edgecolor": GRID}
STYLE |= {"axes.spines.right": False, "axes.spines.top": False}

# A plot: title, unit and, per G, (x, reached, bound, counted) of its points; not all files have counts.
Panel = tuple[str, str, dict[int, list[tuple[float, float, float, float | None]]]]


@dataclass(frozen=True)
class Kind:
    """How a measurement is drawn.

    ``ours``, ``gain``: the contestant that is compared, and where its gains stand. ``by``: points that have these in
    common share their panels, one after the other or row by row. ``panels``: title, unit, what was reached, its bound,
    what was counted of both sides.
    """

    ours: str
    gain: str
    against: str
    title: str
    bound: str
    counted: str
    by: tuple[str, ...]
    in_rows: bool
    x: str
    x_label: str
    panels: tuple[tuple[str, str, str, str, str], ...]


KINDS = {
    "step": Kind(
        ours="grouped",
        gain="grouped_gain",
        against="transformers-batch",
        title="One group, forward and backward: grouped against {}",
        bound="bound by FLOPs",
        counted="counted FLOPs",
        by=("prefix",),
        in_rows=False,
        x="ratio",
        x_label="prefix tokens per response token",
        panels=(("prefix {prefix:,} tokens", "speed-up (times)", "speedup", "flops", "flops"),),
    ),
    "rollout": Kind(
        ours="ours",
        gain="ours_gain",
        against="transformers-generate",
        title="Generating G responses per prompt: ours against {}",
        bound="bound by FLOPs; by keys and values",
        counted="counted FLOPs; peak memory",
        by=("groups", "new_tokens"),
        in_rows=True,
        x="prefix",
        x_label="prefix (tokens)",
        panels=(
            ("tokens/s: {new_tokens} new tokens, {groups} group{s}", "times as fast", "throughput", "flops", "flops"),
            (
                "peak memory: {new_tokens} new tokens, {groups} group{s}",
                "times less memory",
                "memory",
                "kv_bytes",
                "peak_bytes",
            ),
        ),
    ),
}


def require_matplotlib() -> None:
    """Raise ConfigError where figures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "Figures are drawn with matplotlib, which is not installed. Install it with pip install 'vlm-pg[bench]', "
            "or leave the figure out: `vlm-pg bench figure` draws a file of raw numbers at any time."
        )


def write_figure(results: dict[str, Any], path: Path, against: str | None = None) -> Path:
    """Draw what was measured and write it; returns the path.

    ``against``: None for the usual one, or the first one of the file that can be compared where that one is missing.

    Raises:
        ConfigError: no point has both sides, or matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    kind = KINDS.get(results["measurement"])
    if kind is None:
        raise ConfigError(
            f"There is no figure of `vlm-pg bench {results['measurement']}`; of {' and '.join(KINDS)} there is. Read "
            "its numbers in the file."
        )
    names = (name for point in results["points"] for name, entry in point["contestants"].items() if kind.gain in entry)
    others = list(dict.fromkeys(names))
    if against is None:
        against = others[0] if others and kind.against not in others else kind.against
    if against not in others:
        there = f"there are {', '.join(others)}; choose one with --against"
        advice = there if others else "nothing is compared with it"
        raise ConfigError(f"No point of this file has both {kind.ours} and {against}: {advice}.")
    compared = [point for point in results["points"] if kind.gain in point["contestants"].get(against, {})]
    title, drawn = kind.title.format(against), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = _draw(kind, title, results, _rows(kind, compared, against))
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": title})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(drawn.getvalue())
    return path


def _rows(kind: Kind, compared: list[dict[str, Any]], against: str) -> list[list[Panel]]:
    """Panels in rows; one of something that was measured nowhere is left out."""
    rows: list[list[Panel]] = []
    for values in sorted({tuple(point[key] for key in kind.by) for point in compared}):
        points = [point for point in compared if tuple(point[key] for key in kind.by) == values]
        words = dict(zip(kind.by, values), s="s" if points[0].get("groups", 1) > 1 else "")
        rows.append([])
        for title, unit, reached, bound, counted in kind.panels:
            lines: dict[int, list[tuple[float, float, float, float | None]]] = {}
            for point in sorted(points, key=lambda point: (point["generations"], point[kind.x])):
                gain = point["contestants"][against][kind.gain]
                if reached in gain:
                    times = gain.get("counted", {}).get(counted)
                    found = point[kind.x], gain[reached], gain["bounds"][bound], times
                    lines.setdefault(point["generations"], []).append(found)
            if lines:
                rows[-1].append((title.format(**words), unit, lines))
    return rows if kind.in_rows else [[panel for row in rows for panel in row]]


def _draw(kind: Kind, title: str, results: dict[str, Any], rows: list[list[Panel]]) -> Any:
    """Panels in rows and, of training, bars of peak memory below them."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    bars = [] if kind.in_rows else [point for point in results["points"] if _peaks(point)][:BAR_POINTS]
    columns, heights = max(2, *map(len, rows)), [PANEL_HEIGHT] * len(rows) + [BARS_HEIGHT] * bool(bars)
    columns = max(columns, -(-len(bars) // 2))
    width, height = columns * PANEL_WIDTH, sum(heights) + HEAD_HEIGHT
    panels = [panel for row in rows for panel in row]
    counts = sorted({count for _, _, lines in panels for count in lines})
    colors = {count: COLORS[place % len(COLORS)] for place, count in enumerate(counts)}
    top = 0.0 if kind.in_rows else max(map(_top, panels))
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - HEAD_HEIGHT / height))
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for place, row in enumerate(rows):
        for column, panel in enumerate(row):
            _draw_panel(figure.add_subplot(grid[place, column]), panel, kind.x_label, colors, top or _top(panel))
    if bars:
        _draw_bars(figure.add_subplot(grid[-1, :]), bars)
    figure.text(0.1 / width, 1 - 0.22 / height, title, weight="bold")
    figure.text(0.1 / width, 1 - 0.42 / height, _subtitle(results))
    keys = [Line2D([], [], color=color, marker="o", label=f"G={count}") for count, color in colors.items()]
    keys.append(Line2D([], [], color=INK, linestyle="--", label=kind.bound))
    if any(times is not None for _, _, lines in panels for line in lines.values() for *_, times in line):
        keys.append(Line2D([], [], color=INK, linestyle="", marker="x", label=kind.counted))
    below = (0, 1 - 0.45 / height)
    figure.legend(handles=keys, loc="upper left", bbox_to_anchor=below, ncols=len(keys), markerscale=0.6)
    return figure


def _subtitle(results: dict[str, Any]) -> str:
    settings, machine = results["settings"], results["machine"]
    where = str(machine.get("gpu"))
    if settings["device"] != "cuda":
        where = f"{machine['processor']}, threads: {settings['threads']}"
    recomputed = ", checkpointing" if settings.get("checkpointing") else ""
    return f"model {settings['model']}, {settings['dtype']}{recomputed}; {where}"


def _top(panel: Panel) -> float:
    return max(max(reached, bound, times or 0.0) for line in panel[2].values() for _, reached, bound, times in line)


def _draw_panel(axes: Any, panel: Panel, x_label: str, colors: dict[int, str], top: float) -> None:
    title, unit, lines = panel
    for count, line in lines.items():
        xs, reached, bounds, _ = zip(*line)
        # A line of one point cannot be seen: its bound is a mark.
        axes.plot(xs, bounds, "--", color=colors[count], linewidth=1.2, marker="_" if len(line) == 1 else None)
        axes.plot(xs, reached, "o-", color=colors[count], markersize=4)
        if counted := [(x, times) for x, _, _, times in line if times is not None]:
            axes.plot(*zip(*counted), "x", color=colors[count], markersize=6)
    ticks = sorted({x for line in lines.values() for x, *_ in line})
    axes.set(title=title, xlabel=x_label, ylabel=unit, ylim=(0, 1.05 * top))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}x")


def _draw_bars(axes: Any, points: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for point in points for name in _peaks(point)))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [(group + place * width, _peaks(p)[name]) for group, p in enumerate(points) if name in _peaks(p)]
        axes.bar(*zip(*found), width=0.9 * width, color=COLORS[place % len(COLORS)], label=name)
    words = [f"prefix {p['prefix']:,}\nG={p['generations']}, response {p['response']:,}" for p in points]
    axes.set(title="Peak memory of forward and backward, above the weights (GiB)", ylabel="peak memory (GiB)")
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(points))], words)
    axes.set_ylim(0, 1.35 * max(max(_peaks(point).values()) for point in points))
    axes.legend(ncols=3, loc="upper left")


def _peaks(point: dict[str, Any]) -> dict[str, float]:
    """Peak memory in GiB per contestant."""
    found = {name: entry.get("peak_bytes") for name, entry in point["contestants"].items()}
    return {name: peak / GIB for name, peak in found.items() if peak is not None}

"""Panels of lines and bars of memory as one SVG, by matplotlib: equal numbers give an equal file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Told apart by lightness too, not by hue alone (Okabe and Ito's palette).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GRID = "#222222", "#dddddd"
PANEL_WIDTH, PANEL_HEIGHT, BARS_HEIGHT, HEAD_HEIGHT = 3.8, 2.9, 3.4, 0.85  # inches
STYLE = {
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "vlm_pg",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": GRID,
    "legend.frameon": False,
    "text.color": INK,
}

# (x, reached, bound) of each point.
Line = list[tuple[float, float, float]]
# Words below a group of bars, line by line, and GiB by contestant.
Bars = tuple[tuple[str, ...], dict[str, float]]


@dataclass(frozen=True)
class Panel:
    """One plot: what was reached and its bound over x, a line per G."""

    title: str
    x_label: str
    y_label: str
    lines: dict[int, Line]

    @property
    def top(self) -> float:
        """The largest value in it."""
        return max(max(reached, bound) for line in self.lines.values() for _, reached, bound in line)


def draw(
    title: str,
    subtitle: str,
    bound: str,
    rows: Sequence[Sequence[Panel]],
    bars: Sequence[Bars],
    same_height: bool,
) -> bytes:
    """The SVG file: panels in rows and, where there are any, bars of peak memory below them.

    Args:
        bound: what the dashed lines are.
        same_height: all panels have the same scale.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns, below = max(2, *map(len, rows), -(-len(bars) // 2)), 1 if bars else 0
    heights = [PANEL_HEIGHT] * len(rows) + [BARS_HEIGHT] * below
    width, height = columns * PANEL_WIDTH, sum(heights) + HEAD_HEIGHT
    panels = [panel for row in rows for panel in row]
    colors = {count: _color(place) for place, count in enumerate(sorted({c for p in panels for c in p.lines}))}
    top = max(panel.top for panel in panels)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(rect=(0, 0, 1, 1 - HEAD_HEIGHT / height))
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        for place, row in enumerate(rows):
            for column, panel in enumerate(row):
                axes = figure.add_subplot(grid[place, column])
                _draw_panel(axes, panel, colors, top if same_height else panel.top)
        if bars:
            _draw_bars(figure.add_subplot(grid[-1, :]), bars)
        figure.text(0.1 / width, 1 - 0.22 / height, title, weight="bold")
        figure.text(0.1 / width, 1 - 0.42 / height, subtitle)
        keys = [Line2D([], [], color=color, marker="o", label=f"G={count}") for count, color in colors.items()]
        keys.append(Line2D([], [], color=INK, linestyle="--", label=bound))
        figure.legend(
            handles=keys, loc="upper left", bbox_to_anchor=(0, 1 - 0.45 / height), ncols=len(keys), markerscale=0.6
        )
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": title})
    return drawn.getvalue()


def _draw_panel(axes: Any, panel: Panel, colors: dict[int, str], top: float) -> None:
    for count, line in panel.lines.items():
        xs, reached, bounds = zip(*line)
        # A line of one point cannot be seen: its bound is a mark.
        axes.plot(xs, bounds, "--", color=colors[count], linewidth=1.2, marker="_" if len(line) == 1 else None)
        axes.plot(xs, reached, "o-", color=colors[count], markersize=4)
    ticks = sorted({x for line in panel.lines.values() for x, _, _ in line})
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, 1.05 * top))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}x")


def _draw_bars(axes: Any, bars: Sequence[Bars]) -> None:
    names = list(dict.fromkeys(name for _, peaks in bars for name in peaks))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [(group + place * width, peaks[name]) for group, (_, peaks) in enumerate(bars) if name in peaks]
        lefts, heights = zip(*found)
        axes.bar(lefts, heights, width=0.9 * width, color=_color(place), label=name)
    axes.set(title="Peak memory of forward and backward, above the weights (GiB)", ylabel="peak memory (GiB)")
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(bars))], ["\n".join(words) for words, _ in bars])
    axes.legend(ncols=3, loc="upper left")
    axes.set_ylim(0, 1.35 * max(max(peaks.values()) for _, peaks in bars))


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]

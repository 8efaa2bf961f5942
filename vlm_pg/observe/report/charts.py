"""Line charts as inline SVG: axes, units, a faint line of values, a strong line of their rolling mean."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg.observe.report.markup import number, percent, render
from vlm_pg.observe.report.read import Series

MAX_POINTS = 1000


@dataclass(frozen=True)
class Curve:
    """The drawn points of one metric: at most ``MAX_POINTS`` steps with their value and its rolling mean.

    Curve("accuracy", (1, 2, 3), (0.0, 1.0, 0.5), (0.5, 0.5, 0.75))
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    smooth: tuple[float, ...]


def make_curve(name: str, series: Series, smooth: bool = True) -> Curve:
    """Smooth a series over all of its steps (if wanted), then keep the points worth drawing."""
    # Two rolling means in a row: nearby steps weigh more, so one spike makes a bump and not a box.
    window = window_of(len(series.values)) if smooth else 1
    means = rolling_mean(rolling_mean(series.values, window), window)
    drawn = drawn_points(series.values, MAX_POINTS)
    values, smooth_values = (tuple(of[index] for index in drawn) for of in (series.values, means))
    return Curve(name, tuple(series.steps[index] for index in drawn), values, smooth_values)


def window_of(num_points: int) -> int:
    """Width of one rolling mean: an odd number, about a thirtieth of the run; 1 (none) below 20 points."""
    return 2 * max(1, num_points // 60) + 1 if num_points >= 20 else 1


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over ``window`` points; at the ends over those of them that exist.

    rolling_mean([0, 3, 6, 0], 3) == [1.5, 3, 3, 3]
    """
    if window == 1:  # the values themselves, without the rounding that sums would add
        return list(values)
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        first, end = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def drawn_points(values: Sequence[float], limit: int) -> list[int]:
    """Indices to draw: all of them, or the smallest and largest value of each of ``limit / 2`` equal stretches.

    The first and the last point are always drawn, so a spike, the start and the end survive.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    chosen = {0, count - 1}
    stretches = limit // 2 - 1
    for stretch in range(stretches):
        indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        chosen.add(min(indices, key=values.__getitem__))
        chosen.add(max(indices, key=values.__getitem__))
    return sorted(chosen)


_TEMPLATE = Path(__file__).parent / "templates" / "chart.html"
WIDTH, HEIGHT = 540, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 30
NUM_COLORS = 6


@dataclass(frozen=True)
class LineChart:
    """A chart of curves. ``unit``: in words ("nat per token"); ``as_percent``: values are shares, shown in percent."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    as_percent: bool = False
    from_zero: bool = True


@dataclass(frozen=True)
class Frame:
    """The data range of a chart and how it maps to the picture."""

    step_low: float
    step_high: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """Horizontal position of a step, in picture units."""
        return LEFT + (step - self.step_low) / (self.step_high - self.step_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical position of a value, in picture units; values outside the range stay at the border."""
        inside = min(max(value, self.low), self.high)
        return TOP + (self.high - inside) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def draw_chart(chart: LineChart) -> Markup:
    """A figure with title, legend, SVG and the numbers for hovering."""
    frame, clipped = make_frame(chart)
    steps = chart.curves[0].steps
    ends = (
        f"{curve.name} from {_show(curve.smooth[0], chart)} to {_show(curve.smooth[-1], chart)}"
        for curve in chart.curves
    )
    return render(
        _TEMPLATE,
        chart=chart,
        curves=[_lines(curve, color % NUM_COLORS, frame, chart) for color, curve in enumerate(chart.curves)],
        clipped=None if clipped is None else _show(clipped, chart),
        words=f"{chart.title}, steps {steps[0]} to {steps[-1]}: " + "; ".join(ends),
        hover=_hover_data(chart, frame),
        **_axes(frame, chart),
    )


def make_frame(chart: LineChart) -> tuple[Frame, float | None]:
    """The range that shows the curves, and the largest value when rare spikes had to be cut off (else None)."""
    values = [value for curve in chart.curves for value in curve.values]
    low, high = min(values), max(values)
    ordered = sorted(values)
    usual_high = ordered[int(0.98 * (len(ordered) - 1))]
    clipped = None
    if high - low > 4 * (usual_high - low) > 0:
        clipped = high
        high = low + 1.5 * (usual_high - low)
    if chart.from_zero and low >= 0:
        low = 0.0
    if high - low < max(1e-12, 1e-9 * abs(high)):  # practically constant: leave room around the value
        margin = abs(high) * 0.1 if abs(high) > 1e-12 else 0.01 if chart.as_percent else 1.0
        low, high = (0.0, high + margin) if low >= 0 else (low - margin, high + margin)
    steps = [step for curve in chart.curves for step in (curve.steps[0], curve.steps[-1])]
    step_low, step_high = min(steps), max(steps)
    ticks = nice_ticks(low, high, 4)
    gap = ticks[1] - ticks[0]
    # The range starts on a tick; ending on one could leave a lot of empty space above the data.
    bottom = min(low, math.floor(low / gap + 1e-9) * gap)
    top = high if clipped is not None else high + 0.04 * (high - low)
    return Frame(step_low, max(step_high, step_low + 1), bottom, top), clipped


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``, at least two: nice_ticks(0, 1, 4) == [0, .2, .4, ...]."""
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.8)
    first = math.ceil(low / gap - 1e-9)
    last = max(math.floor(high / gap + 1e-9), first + 1)
    return [index * gap for index in range(first, last + 1)]


def _axes(frame: Frame, chart: LineChart) -> dict[str, Any]:
    """Borders of the plot, and ticks with their positions and labels."""
    y_ticks, x_ticks = nice_ticks(frame.low, frame.high, 4), nice_ticks(frame.step_low, frame.step_high, 6)
    gap = y_ticks[1] - y_ticks[0]
    labels = [(frame.x(tick), number(tick)) for tick in x_ticks if tick == int(tick) and tick <= frame.step_high]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "y_ticks": [(frame.y(tick), tick_label(tick, gap, chart)) for tick in y_ticks if tick <= frame.high],
        "x_ticks": [(x, _anchor(x, label), label) for x, label in labels],
    }


def _anchor(x: float, label: str) -> str:
    """A label stays inside the picture, at about 8 units a character, and right of the word "step"."""
    half = 4 * len(label)
    return "end" if x + half > WIDTH else "start" if x - half < LEFT - 6 else "middle"


def _lines(curve: Curve, color: int, frame: Frame, chart: LineChart) -> dict[str, Any]:
    """A dot, or a path through the means and, where they differ, one through the values."""
    alone = len(curve.steps) == 1
    return {
        "color": color,
        "name": curve.name,
        "last": _show(curve.smooth[-1], chart),
        "dot": (frame.x(curve.steps[0]), frame.y(curve.values[0])) if alone else None,
        "raw": None if curve.smooth == curve.values else _path(curve.steps, curve.values, frame),
        "smooth": _path(curve.steps, curve.smooth, frame),
    }


def _path(steps: Sequence[int], values: Sequence[float], frame: Frame) -> Markup:
    points = (f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in zip(steps, values, strict=True))
    return Markup("M" + "L".join(points))  # longer than a text may be


def tick_label(tick: float, gap: float, chart: LineChart) -> str:
    """A tick's number with the decimals that ticks ``gap`` apart need: 0.25, 0.50, 0.75."""
    if tick == 0:
        return "0"
    if chart.as_percent:
        return percent(tick, 0 if gap > 0.00999 else 1 if gap > 0.00099 else 2)
    if abs(tick) >= 1e6 or gap < 1e-4:
        return f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e")
    decimals = next(count for count in range(9) if abs(gap * 10**count - round(gap * 10**count)) < 1e-6)
    return f"{tick:,.{decimals}f}".replace("-", "−")


def _show(value: float, chart: LineChart) -> str:
    return percent(value) if chart.as_percent else number(value)


def _hover_data(chart: LineChart, frame: Frame) -> Markup:
    """The numbers behind the lines, as JSON that cannot end its script element."""

    def short(values: Sequence[float]) -> list[float]:
        return [float(f"{value:.4g}") for value in values]

    data = {
        "percent": chart.as_percent,
        "steps": [frame.step_low, frame.step_high],
        "range": [frame.low, frame.high],
        "plot": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
        "curves": [
            {"name": curve.name, "steps": curve.steps, "values": short(curve.values), "smooth": short(curve.smooth)}
            for curve in chart.curves
        ],
    }
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))

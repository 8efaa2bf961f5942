"""Line charts as inline SVG: axes, units, a faint line of values, a strong line of their rolling mean."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_pg.observe.report.curves import Curve
from vlm_pg.observe.report.markup import esc, number, percent

WIDTH, HEIGHT = 540, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 30
NUM_COLORS = 6


@dataclass(frozen=True)
class Chart:
    """What one chart shows.

    ``unit`` is words for people ("nat per token"); with ``as_percent`` values are shares and shown as per cent.
    """

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


def draw_chart(chart: Chart) -> str:
    """A figure with title, legend, SVG and the numbers for hovering."""
    frame, clipped = make_frame(chart)
    lines = "".join(_lines(curve, color % NUM_COLORS, frame) for color, curve in enumerate(chart.curves))
    note = ""
    if clipped is not None:
        note = f'<div class="note">spikes up to {_show(clipped, chart)} are cut at the upper edge</div>'
    return (
        f'<figure class="chart"><figcaption><b>{esc(chart.title)}</b> <span class="unit">{esc(chart.unit)}</span>'
        f"{_legend(chart)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{esc(_in_words(chart))}">'
        f"{_axes(frame, chart)}{lines}"
        f'<g class="hover" visibility="hidden"><line y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></g></svg>'
        f'{note}<script type="application/json">{_hover_data(chart, frame)}</script></figure>'
    )


def make_frame(chart: Chart) -> tuple[Frame, float | None]:
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
    if high - low < max(1e-12, 1e-9 * abs(high)):  # as good as constant: leave room around the one value
        margin = abs(high) * 0.1 if abs(high) > 1e-12 else 0.01 if chart.as_percent else 1.0
        low, high = (0.0, high + margin) if low >= 0 else (low - margin, high + margin)
    steps = [step for curve in chart.curves for step in (curve.steps[0], curve.steps[-1])]
    step_low, step_high = min(steps), max(steps)
    ticks = nice_ticks(low, high, 4)
    gap = ticks[1] - ticks[0]
    # Range ends on a tick line, except that a lot of empty space above the data is not worth a round number.
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


def _axes(frame: Frame, chart: Chart) -> str:
    parts = []
    ticks = nice_ticks(frame.low, frame.high, 4)
    gap = ticks[1] - ticks[0]
    for tick in ticks:
        if tick > frame.high:
            continue
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick, gap, chart)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    for tick in nice_ticks(frame.step_low, frame.step_high, 6):
        if tick != int(tick) or tick > frame.step_high:
            continue
        x, label = frame.x(tick), number(tick)
        anchor = "end" if x + 4 * len(label) > WIDTH else "middle"  # about 8 units a character: stay inside
        parts.append(f'<text x="{x:.1f}" y="{base + 20}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{base + 20}" text-anchor="end">step</text>')
    return "".join(parts)


def _lines(curve: Curve, color: int, frame: Frame) -> str:
    if len(curve.steps) == 1:
        x, y = frame.x(curve.steps[0]), frame.y(curve.values[0])
        return f'<circle class="dot c{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    smooth = f'<path class="smooth c{color}" d="{_path(curve.steps, curve.smooth, frame)}"/>'
    if curve.smooth == curve.values:
        return smooth
    return f'<path class="raw c{color}" d="{_path(curve.steps, curve.values, frame)}"/>{smooth}'


def _path(steps: Sequence[int], values: Sequence[float], frame: Frame) -> str:
    points = (f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in zip(steps, values, strict=True))
    return "M" + "L".join(points)


def _legend(chart: Chart) -> str:
    keys = []
    for color, curve in enumerate(chart.curves):
        name = f"{esc(curve.name)} " if len(chart.curves) > 1 else ""
        keys.append(
            f'<span class="key c{color % NUM_COLORS}"><i></i>{name}<b>{_show(curve.smooth[-1], chart)}</b></span>'
        )
    return f'<span class="legend">{"".join(keys)}</span>'


def tick_label(tick: float, gap: float, chart: Chart) -> str:
    """A tick's number with the decimals that ticks ``gap`` apart need: 0.25, 0.50, 0.75."""
    if tick == 0:
        return "0"
    if chart.as_percent:
        return percent(tick, 0 if gap > 0.00999 else 1 if gap > 0.00099 else 2)
    if abs(tick) >= 1e6 or gap < 1e-4:
        return f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e")
    decimals = next(count for count in range(9) if abs(gap * 10**count - round(gap * 10**count)) < 1e-6)
    return f"{tick:,.{decimals}f}".replace("-", "−")


def _show(value: float, chart: Chart) -> str:
    return percent(value) if chart.as_percent else number(value)


def _in_words(chart: Chart) -> str:
    ends = (
        f"{curve.name} from {_show(curve.smooth[0], chart)} to {_show(curve.smooth[-1], chart)}"
        for curve in chart.curves
    )
    first, last = chart.curves[0].steps[0], chart.curves[0].steps[-1]
    return f"{chart.title}, steps {first} to {last}: " + "; ".join(ends)


def _hover_data(chart: Chart, frame: Frame) -> str:
    """The numbers behind the lines, as JSON that cannot end its script element."""
    data = {
        "percent": chart.as_percent,
        "steps": [frame.step_low, frame.step_high],
        "range": [frame.low, frame.high],
        "plot": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
        "curves": [
            {
                "name": curve.name,
                "steps": curve.steps,
                "values": [_short(value) for value in curve.values],
                "smooth": [_short(value) for value in curve.smooth],
            }
            for curve in chart.curves
        ],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: float) -> float:
    return float(f"{value:.4g}")

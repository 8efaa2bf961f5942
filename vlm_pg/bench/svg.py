"""A few SVG shapes on an opaque white page, readable wherever the page is shown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vlm_pg.observe.report.charts import nice_ticks

# Told apart by lightness too, not by hue alone (Okabe and Ito's palette).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"


def page(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """The whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="{PAPER}"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def text(x: float, y: float, words: str, anchor: str = "start", bold: bool = False, turn: bool = False) -> str:
    """Words at a point; ``turn``: read from the bottom up."""
    weight = ' font-weight="600"' if bold else ""
    rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}{rotate}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = GRID, dashed: bool = False) -> str:
    """A straight line."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dash}/>'


def curve(points: Sequence[tuple[float, float]], color: str, dashed: bool = False) -> str:
    """A line through points; with dots where it is not dashed."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    style = 'stroke-width="1.5" stroke-dasharray="5 4"' if dashed else 'stroke-width="2.2"'
    drawn = f'<path d="{path}" fill="none" stroke="{color}" {style}/>'
    if not dashed:
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points)
    return drawn


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 up to at least ``highest``."""
    marks = nice_ticks(0.0, max(highest, 1e-9), 4)
    while marks[-1] < highest:
        marks.append(marks[-1] + marks[1])
    return marks

"""A file of ``bench rollout`` as SVG: tokens/s and peak memory of ours against another, over the prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.bench import svg
from vlm_pg.bench.generation.work import OURS
from vlm_pg.bench.results import compared_points, machine_words

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP, ROW = 300, 180, 64, 100, 84, 270
LEGEND_STEP = 70


@dataclass(frozen=True)
class _Line:
    """One G: (prefix, reached, bound) per point."""

    color: str
    points: tuple[tuple[int, float, float], ...]


def draw_rollout_figure(results: dict[str, Any], against: str = "transformers-generate") -> str:
    """One row of two panels per number of new tokens and of groups; a line per G, its bound dashed.

    Raises:
        ConfigError: no point has both sides.
    """
    compared = compared_points(results, "ours_gain", against, OURS)
    settings = results["settings"]
    counts = sorted({point["generations"] for point in compared})
    parts = [
        svg.text(20, 24, f"Generating G responses per prompt: ours against {against}", bold=True),
        svg.text(20, 42, f"model {settings['model']}, {settings['dtype']}; {machine_words(results)}"),
        *_legend(counts),
    ]
    rows = sorted({(point["groups"], point["new_tokens"]) for point in compared})
    for place, (groups, new_tokens) in enumerate(rows):
        points = [p for p in compared if (p["groups"], p["new_tokens"]) == (groups, new_tokens)]
        words = f"{new_tokens} new tokens, {groups} group{'s' if groups > 1 else ''}"
        speed = _lines(points, counts, against, "throughput", "flops")
        memory = _lines(points, counts, against, "memory", "kv_bytes")
        top = TOP + place * ROW
        parts += _panel(LEFT, top, f"tokens/s: {words}", "times as fast", speed)
        if memory:
            parts += _panel(LEFT + PANEL_WIDTH + GAP, top, f"peak memory: {words}", "times less memory", memory)
    width, height = LEFT + 2 * PANEL_WIDTH + GAP + 30, TOP + len(rows) * ROW
    return svg.page(width, height, f"Tokens/s and peak memory of generation, ours against {against}", parts)


def _legend(counts: Sequence[int]) -> list[str]:
    parts = []
    for index, count in enumerate(counts):
        x = 20 + LEGEND_STEP * index
        parts += [svg.curve([(x, 60), (x + 22, 60)], _color(index)), svg.text(x + 28, 64, f"G={count}")]
    x = 20 + LEGEND_STEP * len(counts)
    dashed = svg.curve([(x, 60), (x + 22, 60)], svg.INK, dashed=True)
    return [*parts, dashed, svg.text(x + 28, 64, "bound by FLOPs; by keys and values")]


def _lines(points: list[dict[str, Any]], counts: Sequence[int], against: str, reached: str, bound: str) -> list[_Line]:
    lines = []
    for index, count in enumerate(counts):
        own = sorted((p for p in points if p["generations"] == count), key=lambda p: p["prefix"])
        gains = [(p["prefix"], p["contestants"][against]["ours_gain"]) for p in own]
        found = tuple((prefix, g[reached], g["bounds"][bound]) for prefix, g in gains if reached in g)
        if found:
            lines.append(_Line(_color(index), found))
    return lines


def _panel(left: float, top: float, title: str, y_title: str, lines: list[_Line]) -> list[str]:
    prefixes = sorted({prefix for line in lines for prefix, _, _ in line.points})
    low, high = math.log2(prefixes[0]), math.log2(prefixes[-1])
    marks = svg.ticks(max(max(reached, bound) for line in lines for _, reached, bound in line.points))

    def x_of(prefix: int) -> float:
        share = 0.5 if high == low else (math.log2(prefix) - low) / (high - low)
        return left + 14 + share * (PANEL_WIDTH - 28)

    def y_of(value: float) -> float:
        return top + PANEL_HEIGHT * (1 - value / marks[-1])

    bottom = top + PANEL_HEIGHT
    parts = [svg.text(left + PANEL_WIDTH / 2, top - 8, title, "middle", bold=True)]
    for mark in marks:
        parts += [
            svg.line(left, y_of(mark), left + PANEL_WIDTH, y_of(mark)),
            svg.text(left - 6, y_of(mark) + 4, f"{mark:g}x", "end"),
        ]
    parts += [svg.text(x_of(prefix), bottom + 16, f"{prefix:,}", "middle") for prefix in prefixes]
    parts.append(svg.text(left + PANEL_WIDTH / 2, bottom + 34, "prefix (tokens)", "middle"))
    parts.append(svg.text(left - 46, top + PANEL_HEIGHT / 2, y_title, "middle", turn=True))
    for line in lines:
        parts.append(svg.curve([(x_of(p), y_of(bound)) for p, _, bound in line.points], line.color, dashed=True))
        parts.append(svg.curve([(x_of(p), y_of(reached)) for p, reached, _ in line.points], line.color))
        if len(line.points) == 1:  # a line of one point cannot be seen
            prefix, _, bound = line.points[0]
            x, y = x_of(prefix), y_of(bound)
            parts.append(svg.line(x - 9, y, x + 9, y, line.color, dashed=True))
    return parts


def _color(index: int) -> str:
    return svg.COLORS[index % len(svg.COLORS)]

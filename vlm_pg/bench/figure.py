"""``vlm-pg bench figure``: a file of ``bench step`` (speed-up, its bound, peak memory) or ``bench rollout``, drawn."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_pg.bench import svg
from vlm_pg.bench.generation.figure import draw_rollout_figure
from vlm_pg.bench.generation.work import GENERATION_WORK
from vlm_pg.bench.generation.work import OURS as OUR_GENERATION
from vlm_pg.bench.names import OURS, WORK
from vlm_pg.bench.results import compared_contestants, compared_points, machine_words, read_results

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 250, 200, 64, 96, 62
BAR_POINTS = 6
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="vlm-pg bench figure", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON written by --out of `vlm-pg bench step` or `rollout`")
    parser.add_argument("--out", type=Path, help="SVG file (default: beside the JSON)")
    others = [name for name in (*WORK, *GENERATION_WORK) if name not in (OURS, OUR_GENERATION)]
    defaults = ", ".join(f"{measurement}: {name}" for measurement, name in AGAINST.items())
    parser.add_argument("--against", choices=others, help=f"whom ours is compared with (default of {defaults})")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.file.with_suffix(".svg")
    print(write_figure(read_results(arguments.file), out, arguments.against))
    return 0


def write_figure(results: dict[str, Any], path: Path, against: str | None = None) -> Path:
    """Draw what was measured and write it; returns the path.

    ``against``: None for the usual one, or the first one of the file that can be compared where that one is missing.

    Raises:
        ConfigError: no point has both sides.
    """
    measurement = results["measurement"]
    if against is None:
        others = compared_contestants(results, GAIN[measurement])
        against = AGAINST[measurement]
        if others and against not in others:
            against = others[0]
    drawn = DRAW[measurement](results, against)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn)
    return path


def draw_figure(results: dict[str, Any], against: str = "transformers-batch") -> str:
    """The SVG: one panel per prefix (speed-up over ratio, a line per G, its bound dashed), and bars of peak memory.

    Raises:
        ConfigError: no point has both sides.
    """
    compared = compared_points(results, "grouped_gain", against, OURS)
    prefixes = sorted({point["prefix"] for point in compared})
    counts = sorted({point["generations"] for point in compared})
    width = LEFT + len(prefixes) * (PANEL_WIDTH + GAP)
    with_memory = [point for point in results["points"] if _peaks(point)][:BAR_POINTS]
    width = max(width, 640, LEFT + 150 * len(with_memory) + 40)
    settings, where = results["settings"], machine_words(results)
    recomputed = ", checkpointing" if settings["checkpointing"] else ""
    parts = [
        svg.text(20, 24, f"One group, forward and backward: grouped against {against}", bold=True),
        svg.text(20, 42, f"model {settings['model']}, {settings['dtype']}{recomputed}; {where}"),
        *_count_legend(counts),
    ]
    top_value = max(max(p["contestants"][against]["grouped_gain"][k] for k in ("speedup",)) for p in compared)
    top_value = max(top_value, *(p["contestants"][against]["grouped_gain"]["bounds"]["flops"] for p in compared))
    for index, prefix in enumerate(prefixes):
        points = [point for point in compared if point["prefix"] == prefix]
        parts += _panel(LEFT + index * (PANEL_WIDTH + GAP), prefix, points, counts, against, top_value)
    height = TOP + PANEL_HEIGHT + 60
    if with_memory:
        parts += _bars(height, with_memory)
        height += 330
    return svg.page(width, height, f"Speed-up of grouped over {against}, and peak memory", parts)


def _count_legend(counts: Sequence[int]) -> list[str]:
    parts = []
    for index, count in enumerate(counts):
        x = 20 + 70 * index
        parts += [svg.curve([(x, 58), (x + 22, 58)], _color(index)), svg.text(x + 28, 62, f"G={count}")]
    x = 20 + 70 * len(counts)
    return [*parts, svg.curve([(x, 58), (x + 22, 58)], svg.INK, dashed=True), svg.text(x + 28, 62, "bound by FLOPs")]


def _panel(
    left: float, prefix: int, points: list[dict[str, Any]], counts: Sequence[int], against: str, top_value: float
) -> list[str]:
    marks = svg.ticks(top_value)
    ratios = sorted({point["ratio"] for point in points})
    low, high = math.log2(ratios[0]), math.log2(ratios[-1])

    def x_of(ratio: float) -> float:
        share = 0.5 if high == low else (math.log2(ratio) - low) / (high - low)
        return left + 14 + share * (PANEL_WIDTH - 28)

    def y_of(value: float) -> float:
        return TOP + PANEL_HEIGHT * (1 - value / marks[-1])

    parts = [svg.text(left + PANEL_WIDTH / 2, TOP - 4, f"prefix {prefix:,} tokens", "middle", bold=True)]
    for mark in marks:
        parts += [
            svg.line(left, y_of(mark), left + PANEL_WIDTH, y_of(mark)),
            svg.text(left - 6, y_of(mark) + 4, f"{mark:g}x", "end"),
        ]
    for ratio in ratios:
        parts.append(svg.text(x_of(ratio), TOP + PANEL_HEIGHT + 16, f"{ratio:g}", "middle"))
    below = TOP + PANEL_HEIGHT + 34
    parts.append(svg.text(left + PANEL_WIDTH / 2, below, "prefix tokens per response token", "middle"))
    parts.append(svg.text(left - 46, TOP + PANEL_HEIGHT / 2, "speed-up (times)", "middle", turn=True))
    for index, count in enumerate(counts):
        own = sorted((p for p in points if p["generations"] == count), key=lambda p: p["ratio"])
        gains = [(x_of(p["ratio"]), p["contestants"][against]["grouped_gain"]) for p in own]
        if gains:
            parts.append(svg.curve([(x, y_of(g["bounds"]["flops"])) for x, g in gains], _color(index), dashed=True))
            parts.append(svg.curve([(x, y_of(g["speedup"])) for x, g in gains], _color(index)))
            if len(gains) == 1:  # a line of one point cannot be seen
                x, y = gains[0][0], y_of(gains[0][1]["bounds"]["flops"])
                parts.append(svg.line(x - 9, y, x + 9, y, _color(index), dashed=True))
    return parts


def _bars(top: float, points: list[dict[str, Any]]) -> list[str]:
    names = [name for name in WORK if any(name in _peaks(point) for point in points)]
    highest = max(max(_peaks(point).values()) for point in points)
    marks = svg.ticks(highest)
    base, room = top + 250, 190

    def y_of(value: float) -> float:
        return base - room * value / marks[-1]

    parts = [svg.text(20, top + 6, "Peak memory of forward and backward, above the weights (GiB)", bold=True)]
    right = LEFT + 150 * len(points)
    for mark in marks:
        parts += [svg.line(LEFT, y_of(mark), right, y_of(mark)), svg.text(LEFT - 6, y_of(mark) + 4, f"{mark:g}", "end")]
    parts.append(svg.text(LEFT - 46, base - room / 2, "peak memory (GiB)", "middle", turn=True))
    for index, name in enumerate(names):
        x, y = 20 + 200 * (index % 3), top + 16 + 16 * (index // 3)
        parts += [svg.bar(x, y, 12, 10, _color(index)), svg.text(x + 18, y + 9, name)]
    for place, point in enumerate(points):
        left = LEFT + 150 * place + 14
        for index, name in enumerate(names):
            value = _peaks(point).get(name)
            if value is not None:
                parts.append(svg.bar(left + 24 * index, y_of(value), 22, base - y_of(value), _color(index)))
        middle = left + 12 * len(names)
        parts.append(svg.text(middle, base + 16, f"prefix {point['prefix']:,}", "middle"))
        parts.append(svg.text(middle, base + 31, f"G={point['generations']}, response {point['response']:,}", "middle"))
    return parts


def _peaks(point: dict[str, Any]) -> dict[str, float]:
    """Peak memory in GiB per contestant."""
    found = {name: entry.get("peak_bytes") for name, entry in point["contestants"].items()}
    return {name: peak / GIB for name, peak in found.items() if peak is not None}


def _color(index: int) -> str:
    return svg.COLORS[index % len(svg.COLORS)]


# By measurement: who draws a file, whom ours is compared with unless --against says otherwise, and under which key.
DRAW = {"step": draw_figure, "rollout": draw_rollout_figure}
AGAINST = {"step": "transformers-batch", "rollout": "transformers-generate"}
GAIN = {"step": "grouped_gain", "rollout": "ours_gain"}

"""``vlm-pg bench figure``: a file of ``bench step`` (speed-up, its bound, peak memory) or ``bench rollout``, drawn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm_pg.bench.drawing import Bars, Line, Panel, draw
from vlm_pg.bench.results import read_results
from vlm_pg.errors import ConfigError

BAR_POINTS = 6


@dataclass(frozen=True)
class Kind:
    """How a measurement is drawn. ``ours``, ``gain``: the contestant that is compared, and where its gains stand."""

    ours: str
    gain: str
    against: str
    title: str
    bound: str


KINDS = {
    "step": Kind(
        "grouped",
        "grouped_gain",
        "transformers-batch",
        "One group, forward and backward: grouped against {}",
        "bound by FLOPs",
    ),
    "rollout": Kind(
        "ours",
        "ours_gain",
        "transformers-generate",
        "Generating G responses per prompt: ours against {}",
        "bound by FLOPs; by keys and values",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run from the command line."""
    from vlm_pg.bench import rollout, step

    parser = argparse.ArgumentParser(prog="vlm-pg bench figure", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON written by --out of `vlm-pg bench step` or `rollout`")
    parser.add_argument("--out", type=Path, help="SVG file (default: beside the JSON)")
    ours = {kind.ours for kind in KINDS.values()}
    others = [name for name in (*step.CONTESTANTS, *rollout.CONTESTANTS) if name not in ours]
    defaults = ", ".join(f"{measurement}: {kind.against}" for measurement, kind in KINDS.items())
    parser.add_argument("--against", choices=others, help=f"whom ours is compared with (default of {defaults})")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.file.with_suffix(".svg")
    print(write_figure(read_results(arguments.file), out, arguments.against))
    return 0


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
    kind = KINDS[results["measurement"]]
    names = (name for point in results["points"] for name, entry in point["contestants"].items() if kind.gain in entry)
    others = list(dict.fromkeys(names))
    if against is None:
        against = others[0] if others and kind.against not in others else kind.against
    if against not in others:
        there = f"there are {', '.join(others)}; choose one with --against"
        advice = there if others else "nothing is compared with it"
        raise ConfigError(f"No point of this file has both {kind.ours} and {against}: {advice}.")
    compared = [point for point in results["points"] if kind.gain in point["contestants"].get(against, {})]
    of_step = results["measurement"] == "step"
    rows = [_step_panels(compared, against)] if of_step else _rollout_panels(compared, against)
    bars = [_bars(point) for point in results["points"]] if of_step else []
    bars = [group for group in bars if group[1]][:BAR_POINTS]
    drawn = draw(kind.title.format(against), _subtitle(results), kind.bound, rows, bars, same_height=of_step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(drawn)
    return path


def _subtitle(results: dict[str, Any]) -> str:
    settings, machine = results["settings"], results["machine"]
    where = str(machine.get("gpu"))
    if settings["device"] != "cuda":
        where = f"{machine['processor']}, threads: {settings['threads']}"
    recomputed = ", checkpointing" if settings.get("checkpointing") else ""
    return f"model {settings['model']}, {settings['dtype']}{recomputed}; {where}"


def _step_panels(compared: list[dict[str, Any]], against: str) -> list[Panel]:
    """One per prefix: speed-up over the ratio of prefix to response."""
    return [
        Panel(
            f"prefix {prefix:,} tokens",
            "prefix tokens per response token",
            "speed-up (times)",
            _lines(
                [p for p in compared if p["prefix"] == prefix], against, "grouped_gain", "ratio", "speedup", "flops"
            ),
        )
        for prefix in sorted({point["prefix"] for point in compared})
    ]


def _rollout_panels(compared: list[dict[str, Any]], against: str) -> list[list[Panel]]:
    """A row per number of groups and of new tokens: tokens/s, and peak memory where it was measured."""
    rows = []
    for groups, new_tokens in sorted({(point["groups"], point["new_tokens"]) for point in compared}):
        points = [p for p in compared if (p["groups"], p["new_tokens"]) == (groups, new_tokens)]
        words = f"{new_tokens} new tokens, {groups} group{'s' if groups > 1 else ''}"
        speed = _lines(points, against, "ours_gain", "prefix", "throughput", "flops")
        memory = _lines(points, against, "ours_gain", "prefix", "memory", "kv_bytes")
        row = [Panel(f"tokens/s: {words}", "prefix (tokens)", "times as fast", speed)]
        if memory:
            row.append(Panel(f"peak memory: {words}", "prefix (tokens)", "times less memory", memory))
        rows.append(row)
    return rows


def _lines(points: list[dict[str, Any]], against: str, gain: str, x: str, reached: str, bound: str) -> dict[int, Line]:
    lines: dict[int, Line] = {}
    for point in sorted(points, key=lambda point: (point["generations"], point[x])):
        found = point["contestants"][against][gain]
        if reached in found:
            lines.setdefault(point["generations"], []).append((point[x], found[reached], found["bounds"][bound]))
    return lines


def _bars(point: dict[str, Any]) -> Bars:
    """Peak memory in GiB per contestant."""
    found = {name: entry.get("peak_bytes") for name, entry in point["contestants"].items()}
    words = f"prefix {point['prefix']:,}", f"G={point['generations']}, response {point['response']:,}"
    return words, {name: peak / 2**30 for name, peak in found.items() if peak is not None}

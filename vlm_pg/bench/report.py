"""What `vlm-pg bench step` prints: every gain with its bound and the share of the bound that was reached."""

from __future__ import annotations

import statistics
from typing import Any

from vlm_pg.bench.budget import expected_peak_bytes
from vlm_pg.bench.flops import bounds
from vlm_pg.bench.grid import Point
from vlm_pg.bench.names import OURS, WORK
from vlm_pg.bench.shapes import LanguageShape

GIB = 2**30
# On a CPU the main thread computes all the time; if it had a core for less than this share, others were computing too.
UNDISTURBED_SHARE = 0.9


def summarise(
    point: Point, measured: dict[str, Any], shape: LanguageShape, checkpointing: bool, element_bytes: int
) -> dict[str, Any]:
    """The record of a point: raw numbers per contestant and, beside each, how ours compares and could compare."""
    ours = measured["contestants"].get(OURS)
    contestants = {}
    for name, numbers in measured["contestants"].items():
        entry = {**numbers, "median_seconds": statistics.median(numbers["seconds"])}
        if ours is not None and name != OURS:
            entry["grouped_gain"] = _gain(point, name, entry, ours, shape, checkpointing, element_bytes)
        contestants[name] = entry
    return {
        "prefix": point.prefix,
        "generations": point.generations,
        "response": point.response,
        "ratio": point.ratio,
        "lengths": list(point.lengths),
        "contestants": contestants,
        "failed": measured["failed"],
    }


def _gain(
    point: Point,
    name: str,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    shape: LanguageShape,
    checkpointing: bool,
    element_bytes: int,
) -> dict[str, Any]:
    bound = bounds(
        shape, WORK[name](point.prefix, point.lengths), WORK[OURS](point.prefix, point.lengths), checkpointing
    )
    faster = theirs["median_seconds"] / statistics.median(ours["seconds"])
    gain: dict[str, Any] = {"bounds": bound, "speedup": faster, "speedup_share": faster / bound["flops"]}
    if theirs.get("cpu_seconds") and ours.get("cpu_seconds"):
        gain["cpu_speedup"] = statistics.median(theirs["cpu_seconds"]) / statistics.median(ours["cpu_seconds"])
    if theirs.get("peak_bytes") and ours.get("peak_bytes"):
        expected = [expected_peak_bytes(n, shape, point, checkpointing, element_bytes) for n in (name, OURS)]
        less = theirs["peak_bytes"] / ours["peak_bytes"]
        gain |= {"memory": less, "memory_bound": expected[0] / expected[1]}
        gain["memory_share"] = less / gain["memory_bound"]
    return gain


def point_lines(record: dict[str, Any]) -> list[str]:
    """One line per contestant of a measured point."""
    lines = []
    for name, entry in record["contestants"].items():
        peak = f"{entry['peak_bytes'] / GIB:8.2f} GiB" if entry.get("peak_bytes") is not None else " " * 12
        line = f"  {name:24}{entry['median_seconds']:9.3f} s {peak}"
        if gain := entry.get("grouped_gain"):
            line += f"   {gain_words(gain)}"
        lines.append(line)
    if busy := disturbed(record):
        by_processor = ", ".join(
            f"{name} {gain['cpu_speedup']:.2f}x (bound {gain['bounds']['flops']:.2f}x, "
            f"{gain['cpu_speedup'] / gain['bounds']['flops']:.0%} of it)"
            for name, entry in record["contestants"].items()
            if "cpu_speedup" in (gain := entry.get("grouped_gain", {}))
        )
        lines.append(f"  other programs were busy: {', '.join(busy)} had a core only part of the time; measure again")
        if by_processor:
            lines.append(f"  in processor seconds, grouped is faster than {by_processor}")
    lines += [f"  {name:24} failed: {reason}" for name, reason in record["failed"].items()]
    return lines


def disturbed(record: dict[str, Any]) -> list[str]:
    """Contestants that had to wait for a core; processor seconds are taken on CPUs only."""
    return [
        name
        for name, entry in record["contestants"].items()
        if sum(entry.get("cpu_seconds", entry["seconds"])) < UNDISTURBED_SHARE * sum(entry["seconds"])
    ]


def gain_words(gain: dict[str, Any]) -> str:
    """Achieved, bound and share of the bound, for time and memory."""
    bound = gain["bounds"]
    words = (
        f"grouped {gain['speedup']:.2f}x faster (bound {bound['flops']:.2f}x by FLOPs, "
        f"{bound['tokens']:.2f}x by tokens, {bound['attention']:.2f}x by attention: "
        f"{gain['speedup_share']:.0%} of the FLOP bound)"
    )
    if "memory" in gain:
        words += (
            f", {memory_words(gain['memory'])} memory (bound {memory_words(gain['memory_bound'])} by the memory "
            f"model: {gain['memory_share']:.0%} of it)"
        )
    return words


def memory_words(ratio: float) -> str:
    return f"{ratio:.2f}x less" if ratio >= 1 else f"{1 / ratio:.2f}x more"

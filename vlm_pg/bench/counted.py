"""What was counted of a contestant, said beside what was measured of it."""

from __future__ import annotations

from typing import Any

from vlm_pg.bench.runner import memory_words
from vlm_pg.memory import GIB


def counted_gain(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """How many times as much they are asked to do, as ``counted``, where both were counted."""
    if "counted" not in theirs or "counted" not in ours:
        return {}
    return {"counted": {key: theirs["counted"][key] / ours["counted"][key] for key in ours["counted"]}}


def counted_lines(entry: dict[str, Any], gain: dict[str, Any] | None, ours: str, decimals: int = 2) -> list[str]:
    """The line below a contestant's: what was counted, or why nothing was; none of a file without counts.

    Args:
        gain: of ours over it, where there is something to compare.
        decimals: of GiB.
    """
    if "not_counted" in entry:
        return [f"    not counted: {entry['not_counted']}"]
    counted = entry.get("counted")
    if counted is None:
        return []
    words = f"    counted: {counted['peak_bytes'] / GIB:.{decimals}f} GiB"
    if entry.get("peak_bytes"):
        words += f" ({counted['peak_bytes'] / entry['peak_bytes']:.2f} of the measured peak)"
    words += f", {counted['flops'] / 1e12:.3f} TFLOP, {counted['bytes'] / 1e9:.1f} GB, {counted['launches']:,} kernels"
    if times := (gain or {}).get("counted"):
        words += (
            f"; {ours} has {times['flops']:.2f}x fewer FLOPs, {times['bytes']:.2f}x fewer bytes, "
            f"{memory_words(times['peak_bytes'])} memory"
        )
    return [words]

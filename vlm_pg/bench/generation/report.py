"""What `vlm-pg bench rollout` prints: speed and memory of every contestant, and how ours compares."""

from __future__ import annotations

import statistics
from typing import Any

from vlm_pg.bench.generation.grid import RolloutPoint
from vlm_pg.bench.generation.work import GENERATION_WORK, OURS, generation_bounds, kv_bytes
from vlm_pg.bench.report import GIB, disturbed, memory_words
from vlm_pg.bench.shapes import LanguageShape


def summarise_generation(
    point: RolloutPoint, measured: dict[str, Any], shape: LanguageShape, element_bytes: int
) -> dict[str, Any]:
    """The record of a point: raw numbers per contestant, speeds from their medians, and ours against each other one."""
    contestants = {
        name: {**numbers, **_speeds(point, numbers), **_expected(point, name, shape, element_bytes)}
        for name, numbers in measured["contestants"].items()
    }
    ours = contestants.get(OURS)
    for name, entry in contestants.items():
        if ours is not None and name != OURS:
            entry["ours_gain"] = _gain(entry, ours)
            works = (GENERATION_WORK[name](point), GENERATION_WORK[OURS](point))
            entry["ours_gain"]["bounds"] = generation_bounds(shape, *works, element_bytes)
    return {**point.identity, "contestants": contestants, "failed": measured["failed"]}


def _speeds(point: RolloutPoint, numbers: dict[str, Any]) -> dict[str, float]:
    whole, first = statistics.median(numbers["seconds"]), statistics.median(numbers["first_seconds"])
    return {
        "median_seconds": whole,
        "tokens_per_second": point.rollouts * point.new_tokens / whole,
        "first_token_seconds": first,
        "decode_seconds_per_token": (whole - first) / (point.new_tokens - 1),
    }


def _expected(point: RolloutPoint, name: str, shape: LanguageShape, element_bytes: int) -> dict[str, float]:
    work = GENERATION_WORK[name](point)
    return {"prefill_tokens": work.prefill.tokens, "kv_bytes": kv_bytes(shape, work, element_bytes)}


def _gain(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    gain: dict[str, Any] = {
        "throughput": ours["tokens_per_second"] / theirs["tokens_per_second"],
        "first_token": theirs["first_token_seconds"] / ours["first_token_seconds"],
    }
    # Where decoding takes nearly no time, the difference of two medians can come out as nothing or less.
    if min(theirs["decode_seconds_per_token"], ours["decode_seconds_per_token"]) > 0:
        gain["decode"] = theirs["decode_seconds_per_token"] / ours["decode_seconds_per_token"]
    if theirs.get("peak_bytes") and ours.get("peak_bytes"):
        gain["memory"] = theirs["peak_bytes"] / ours["peak_bytes"]
    return gain


def generation_lines(record: dict[str, Any]) -> list[str]:
    """Two lines per contestant of a measured point: its own numbers, then ours against it."""
    lines = []
    for name, entry in record["contestants"].items():
        peak = f"{entry['peak_bytes'] / GIB:8.3f} GiB" if entry.get("peak_bytes") is not None else " " * 12
        line = (
            f"  {name:24}{entry['tokens_per_second']:9.1f} tok/s, first after {entry['first_token_seconds']:.3f} s, "
            f"then {1e3 * entry['decode_seconds_per_token']:.1f} ms a token {peak} "
            f"(keys and values {entry['kv_bytes'] / GIB:.3f})"
        )
        if entry["equal_tokens"] < 1:
            line += f", {entry['equal_tokens']:.1%} of its tokens equal"
        lines.append(line)
        if gain := entry.get("ours_gain"):
            lines.append(f"    {generation_gain_words(gain)}")
    if busy := disturbed(record):
        lines.append(f"  other programs were busy: {', '.join(busy)} had a core only part of the time; measure again")
    lines += [f"  {name:24} failed: {reason}" for name, reason in record["failed"].items()]
    return lines


def generation_gain_words(gain: dict[str, Any]) -> str:
    """Ours against one contestant, in times as fast: what was reached beside what counting allows."""
    bound = gain["bounds"]
    words = (
        f"ours, times as fast: {gain['throughput']:.2f}x tokens/s (bound {bound['flops']:.2f}x by FLOPs), "
        f"{gain['first_token']:.2f}x to the first token (bound {bound['prefill_tokens']:.2f}x by prompt tokens)"
    )
    if "decode" in gain:
        words += f", {gain['decode']:.2f}x decoding"
    if "memory" in gain:
        words += f"; {memory_words(gain['memory'])} memory (keys and values alone: {memory_words(bound['kv_bytes'])})"
    return words

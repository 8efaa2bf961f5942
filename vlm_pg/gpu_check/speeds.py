"""What measured seconds say about a GPU: the share of its peak that was reached, beside the least time possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_pg.bench import rollout, step
from vlm_pg.bench.flops import forward_flops, generation_flops, parameter_count
from vlm_pg.bench.grid import RolloutPoint, StepPoint
from vlm_pg.bench.paper.devices import ALL, Device, device_called
from vlm_pg.bench.shapes import SIZES, LanguageShape

BYTES = {"bf16": 2, "fp32": 4}
# Backward is two forwards for every product of two matrices, those of attention too.
STEP_FORWARDS = 3


def rows(figures: Mapping[str, Any], gpu: str | None) -> list[dict[str, Any]]:
    """A row for each contestant at each point of a file of ``bench step`` or ``rollout``, as the page shows it."""
    settings, kind = figures.get("settings") or {}, figures.get("measurement")
    shape = SIZES.get(settings.get("model", ""))
    if shape is None or kind not in ("step", "rollout"):
        return []
    make = _step_row if kind == "step" else _rollout_row
    called = device_called(gpu)
    device = ALL[called] if called else None
    found = []
    for point in figures.get("points") or []:
        for name, entry in point["contestants"].items():
            row = {
                "measurement": kind,
                "model": settings["model"],
                "contestant": name,
                "seconds": entry["median_seconds"],
            }
            row["peak_bytes"] = entry.get("peak_bytes")
            found.append(row | make(shape, settings, point, name, entry, device))
    return found


def _step_row(
    shape: LanguageShape, settings: Mapping[str, Any], point: Mapping[str, Any], name: str, entry: Mapping[str, Any],
    device: Device | None,
) -> dict[str, Any]:  # fmt: skip
    """``flops_share``: model FLOP utilisation: operations over time and peak, without
    those that checkpointing and flash attention's backward compute again."""
    prefix, count, response = point["prefix"], point["generations"], point["response"]
    dtype = settings.get("dtype", "bf16")
    work = step.CONTESTANTS[name].work(
        prefix, StepPoint(prefix, count, response, settings.get("ragged", False)).lengths
    )
    flops = STEP_FORWARDS * forward_flops(shape, work)
    gain = entry.get("grouped_gain", {})
    bound = gain.get("bounds", {})
    return {
        "point": f"{prefix:,}, {count}, {response:,}",
        "tflops": flops / entry["median_seconds"] / 1e12,
        "flops_share": None if device is None else flops / entry["median_seconds"] / device.flops_per_second[dtype],
        "ours_faster": gain.get("speedup"),
        "bound_tokens": bound.get("tokens"),
        "bound_flops": bound.get("flops"),
        "share_of_token_bound": gain["speedup"] / bound["tokens"] if gain and bound.get("tokens") else None,
    }


def _rollout_row(
    shape: LanguageShape, settings: Mapping[str, Any], point: Mapping[str, Any], name: str, entry: Mapping[str, Any],
    device: Device | None,
) -> dict[str, Any]:  # fmt: skip
    where = RolloutPoint(point["prefix"], point["generations"], point["new_tokens"], point["groups"])
    work = rollout.CONTESTANTS[name].work(where)
    decode = entry["decode_seconds_per_token"]
    least = None
    if device is not None:
        least = read_once_bytes(shape, where, settings.get("dtype", "bf16")) / device.bytes_per_second
    gain = entry.get("ours_gain", {})
    return {
        "point": f"{where.prefix:,}, {where.generations}, {where.new_tokens:,}, {where.groups}",
        "tflops": generation_flops(shape, work) / entry["median_seconds"] / 1e12,
        "tokens_per_second": entry["tokens_per_second"],
        "first_token_seconds": entry["first_token_seconds"],
        "decode_seconds": decode,
        "least_decode_seconds": least,
        "times_least": None if least is None else decode / least,
        "ours_faster": gain.get("throughput"),
        "bound_flops": gain.get("bounds", {}).get("flops"),
    }


def read_once_bytes(shape: LanguageShape, point: RolloutPoint, dtype: str = "bf16") -> float:
    """What a decoded token of all responses must read, in the middle of decoding: all weights but the table of
    input embeddings, of which few rows are, and the keys and values of each prompt once and of each response."""
    weights = parameter_count(shape) - (0 if shape.tied else shape.vocab * shape.hidden)
    tokens = point.groups * (point.prefix + point.generations * point.new_tokens / 2)
    return BYTES[dtype] * (weights + tokens * 2 * shape.full_layers * shape.kv_heads * shape.head_dim)

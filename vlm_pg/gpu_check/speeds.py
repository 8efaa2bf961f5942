"""What measured seconds say about a GPU: the share of its peak that was reached, beside the least time possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_pg.bench import rollout, step
from vlm_pg.bench.flops import forward_flops, generation_flops, parameter_count
from vlm_pg.bench.grid import RolloutPoint, StepPoint
from vlm_pg.bench.shapes import SIZES, LanguageShape

HALF_BYTES = 2
# Backward is two forwards for every product of two matrices, those of attention too.
STEP_FORWARDS = 3


@dataclass(frozen=True)
class Peak:
    """Of a GPU: bf16 operations a second (dense, sums in fp32) and bytes a second of its memory."""

    flops: float
    bytes: float


# By what the driver's name contains, the first that fits. Source: NVIDIA's data sheets of H200, H100 and A100 (half of
# the figures that are given with sparsity), and the Ada architecture's white paper for the RTX 4090.
PEAKS: dict[str, Peak] = {
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100 NVL": Peak(835e12, 3.9e12),
    "H100": Peak(989e12, 3.35e12),
    "A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "A100-PCIE-40GB": Peak(312e12, 1.555e12),
    "A100 80GB PCIe": Peak(312e12, 1.935e12),
    "A100": Peak(312e12, 2.039e12),
    "RTX 4090": Peak(165.2e12, 1.008e12),
}


def peak_of(name: str | None) -> Peak | None:
    """Of the GPU of that name, None where it is not known here."""
    return next((peak for part, peak in PEAKS.items() if name and part in name), None)


def rows(figures: Mapping[str, Any], gpu: str | None) -> list[dict[str, Any]]:
    """A row for each contestant at each point of a file of ``bench step`` or ``rollout``, as the page shows it."""
    settings, kind = figures.get("settings") or {}, figures.get("measurement")
    shape = SIZES.get(settings.get("model", ""))
    if shape is None or kind not in ("step", "rollout"):
        return []
    make = _step_row if kind == "step" else _rollout_row
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
            found.append(row | make(shape, settings, point, name, entry, peak_of(gpu)))
    return found


def _step_row(
    shape: LanguageShape, settings: Mapping[str, Any], point: Mapping[str, Any], name: str, entry: Mapping[str, Any],
    peak: Peak | None,
) -> dict[str, Any]:  # fmt: skip
    """``flops_share``: model FLOP utilisation: operations over time and peak, without
    those that checkpointing and flash attention's backward compute again."""
    prefix, count, response = point["prefix"], point["generations"], point["response"]
    work = step.CONTESTANTS[name].work(
        prefix, StepPoint(prefix, count, response, settings.get("ragged", False)).lengths
    )
    flops = STEP_FORWARDS * forward_flops(shape, work)
    gain = entry.get("grouped_gain", {})
    bound = gain.get("bounds", {})
    return {
        "point": f"{prefix:,}, {count}, {response:,}",
        "tflops": flops / entry["median_seconds"] / 1e12,
        "flops_share": None if peak is None else flops / entry["median_seconds"] / peak.flops,
        "ours_faster": gain.get("speedup"),
        "bound_tokens": bound.get("tokens"),
        "bound_flops": bound.get("flops"),
        "share_of_token_bound": gain["speedup"] / bound["tokens"] if gain and bound.get("tokens") else None,
    }


def _rollout_row(
    shape: LanguageShape, settings: Mapping[str, Any], point: Mapping[str, Any], name: str, entry: Mapping[str, Any],
    peak: Peak | None,
) -> dict[str, Any]:  # fmt: skip
    where = RolloutPoint(point["prefix"], point["generations"], point["new_tokens"], point["groups"])
    work = rollout.CONTESTANTS[name].work(where)
    decode = entry["decode_seconds_per_token"]
    least = None if peak is None else read_once_bytes(shape, where) / peak.bytes
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


def read_once_bytes(shape: LanguageShape, point: RolloutPoint) -> float:
    """What a decoded token of all responses must read in bf16, in the middle of decoding: all weights but the table of
    input embeddings, of which few rows are, and the keys and values of each prompt once and of each response."""
    weights = parameter_count(shape) - (0 if shape.tied else shape.vocab * shape.hidden)
    tokens = point.groups * (point.prefix + point.generations * point.new_tokens / 2)
    return HALF_BYTES * (weights + tokens * 2 * shape.full_layers * shape.kv_heads * shape.head_dim)

"""The page of a result: one self-contained HTML file; measured seconds beside the shares of a GPU's peaks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.bench.gpu_check.counted import ALL_DEVICES, device_called
from scripts.bench.gpu_check.run import PAGE, Result
from scripts.bench.others import CONTESTANTS as STEP_CONTESTANTS
from vlm_pg.bench.runner import SIZES
from vlm_pg.bench.work import StepPoint, forward_flops
from vlm_pg.files import write_bytes_atomic
from vlm_pg.memory import GIB
from vlm_pg.models.memory_sizes import LanguageShape
from vlm_pg.observe.report.markup import page
from vlm_pg.plan.devices import Device

_HERE = Path(__file__).parent
# Packages whose versions stand on the page; result.json has all.
SHOWN = (
    "torch", "torchvision", "transformers", "triton", "flash-attn", "liger-kernel", "prefix-grouper", "peft",
    "deepspeed", "accelerate", "av", "qwen-vl-utils", "numpy", "vlm-pg",
)  # fmt: skip


def write_page(result: Result) -> None:
    """Write ``report.html`` beside the result."""
    write_bytes_atomic(result.folder / PAGE, render(result.as_json()).encode("utf-8", "backslashreplace"))


def render(result: dict[str, Any]) -> str:
    """The page of what ``result.json`` holds."""
    stages = result["stages"]
    figures = {stage["name"]: stage["figures"] for stage in stages}
    device = figures.get("environment", {}).get("device", {})
    gpu = device.get("name") or next((one["name"] for one in result["machine"]["gpus"]), None)
    on_gpu = gpu if result["device"] == "cuda" else None
    measured = [row for found in figures.values() for row in rows(found, on_gpu)]
    return page(
        _HERE / "page.html",
        f"vlm_pg on {on_gpu or 'a CPU'}",
        styles=[_HERE / "page.css"],
        gib=_gib,
        result=result,
        machine=result["machine"],
        gpu=on_gpu,
        device=device,
        versions={name: result["machine"]["packages"].get(name, "not installed") for name in SHOWN},
        steps=_with_bars(row for row in measured if row["measurement"] == "step"),
        rollouts=_with_bars(row for row in measured if row["measurement"] == "rollout"),
        trainings={name: found for name, found in figures.items() if "accuracy_after" in found},
        kernels=figures.get("kernels", {}).get("checks", []),
        tests=figures.get("tests", {}),
        whole_steps=[found["whole_step"] for found in figures.values() if "whole_step" in found],
        beside=figures.get("counted", {}).get("beside", []),
        counted=next((stage for stage in stages if stage["name"] == "counted"), None),
    )


def _with_bars(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the width of its bar in percent of the longest of its model and point."""
    found = list(found)
    longest: dict[Any, float] = {}
    for row in found:
        key = row["model"], row["point"]
        longest[key] = max(longest.get(key, 0.0), row["seconds"])
    return [row | {"width": f"{100 * row['seconds'] / longest[row['model'], row['point']]:.1f}"} for row in found]


def _gib(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / GIB:.2f} GiB"


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
    device = ALL_DEVICES[called] if called else None
    found = []
    for point in figures.get("points") or []:
        for name, entry in point["contestants"].items():
            row = {"measurement": kind, "model": settings["model"], "contestant": name}
            row |= {"seconds": entry["median_seconds"], "peak_bytes": entry.get("peak_bytes")}
            found.append(row | make(shape, settings, point, name, entry, device))
    return found


def _step_row(
    shape: LanguageShape, settings: Mapping[str, Any], point: Mapping[str, Any], name: str, entry: Mapping[str, Any],
    device: Device | None,
) -> dict[str, Any]:  # fmt: skip
    """``flops_share``: model FLOP utilisation, without what checkpointing and flash attention compute again."""
    prefix, count, response = point["prefix"], point["generations"], point["response"]
    dtype = settings.get("dtype", "bf16")
    lengths = StepPoint(prefix, count, response, settings.get("ragged", False)).lengths
    work = STEP_CONTESTANTS[name].work(prefix, lengths)
    speed = STEP_FORWARDS * forward_flops(shape, work) / entry["median_seconds"]
    gain = entry.get("grouped_gain", {})
    bound = gain.get("bounds", {})
    return {
        "point": f"{prefix:,}, {count}, {response:,}",
        "tflops": speed / 1e12,
        "flops_share": None if device is None else speed / device.flops_per_second[BYTES[dtype]],
        "ours_faster": gain.get("speedup"),
        "bound_tokens": bound.get("tokens"),
        "bound_flops": bound.get("flops"),
        "share_of_token_bound": gain["speedup"] / bound["tokens"] if gain and bound.get("tokens") else None,
    }


def _rollout_row(
    shape: LanguageShape, settings: Mapping[str, Any], point: Mapping[str, Any], name: str, entry: Mapping[str, Any],
    device: Device | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "point": f"{point['prefix']:,}, {point['generations']}, {point['new_tokens']:,}, {point['groups']}",
        "tokens_per_second": entry["tokens_per_second"],
        "first_token_seconds": entry["first_token_seconds"],
        "decode_seconds": entry["decode_seconds_per_token"],
        "ours_faster": entry.get("ours_gain", {}).get("throughput"),
    }

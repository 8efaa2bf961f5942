"""The page: one file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from vlm_pg.files import write_bytes_atomic
from vlm_pg.gpu_check.result import PAGE, Result
from vlm_pg.gpu_check.speeds import rows
from vlm_pg.memory import GIB
from vlm_pg.observe.report.markup import duration, number, percent, shown

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
    template = resources.files("vlm_pg.gpu_check").joinpath("page.html").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=shown
    )
    environment.filters |= {"number": number, "duration": duration, "percent": percent, "gib": _gib}
    stages = result["stages"]
    figures = {stage["name"]: stage["figures"] for stage in stages}
    device = figures.get("environment", {}).get("device", {})
    gpu = device.get("name") or next((one["name"] for one in result["machine"]["gpus"]), None)
    measured = [row for found in figures.values() for row in rows(found, gpu if result["device"] == "cuda" else None)]
    return environment.from_string(template).render(
        result=result,
        machine=result["machine"],
        gpu=gpu if result["device"] == "cuda" else None,
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

"""The file of ``vlm-pg bench paper``. Its shape, which other programs read:

    {"format": 1, "measurement": "paper", "what": "counted, not measured ...", "commands": [...], "machine": {...},
     "settings": {"dtype", "checkpointing", "lora", "liger", "launch_seconds"},
     "devices": {NAME: {"flops_per_second": {dtype: n}, "bytes_per_second": n, "memory_bytes": n, "source": words,
                        "driver_names": [what the driver calls it]}},
     "links": {NAME: {"name", "bytes_per_second": n, "source": words}} where something was sent over them,
     "entries": [
       {"model", "work": "step" | "rollout" | "tower" | "grpo-step", "point": {...}, "contestant",
        "weights_bytes", "peak_bytes" (above the weights, gradients included), "end_bytes",
        "counts": {"flops": {kind: n}, "bytes": {kind: n}, "launches": n, "waits": {line: n},
                   "bytes_by_operation": {kind: {operation: n}}, "launches_by_operation": {operation: n}},
        "parts": {"update"} | {"prefill", "steps"} | {"tower"} | all of these: counts of each, which sum to "counts",
        "phases": of a whole step {"vision" | "rollout" | "reference" | "update": {"counts", "peak_bytes", "roofline"}},
        "middle": counts of one decode step halfway (rollouts), "captured_launches", "replays": {DEVICE: n} (ours, as
        CUDA graphs, on devices where a step can be recorded; of a lower bound all steps are), "eager_steps": n (steps
        that the host launches one by one, and as many as recording takes),
        "sequence_ranks": n, "sequence_rank": which of them was counted, where an update's stream is divided; then
        "counts" and "parts" have "sent": {collective: bytes to the others}, and "kinds" of a roofline "wire",
        "linear_attention": "reference" where it was torch's operators that were counted,
        "layers_counted": [a, b] where counts follow from models of so many layers (then a step's peak is a least),
        "roofline": {DEVICE: {"seconds", "device_seconds", "launch_seconds", "roof", "kinds", "fits",
        "expected_seconds"}}: "seconds" is a lower bound, "expected_seconds" what to expect,
        "middle_roofline": the same of "middle"},
       {"model", "work", "point", "contestant", "not_counted": why}]}

``point`` has what the files of ``vlm-pg bench step`` and ``rollout`` have of it: prefix, generations, response or
new_tokens, groups; of a whole step frames. Kinds are matmul, attention, elementwise, reduction, copy. Bytes and seconds
are plain numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlm_pg.bench.paper.devices import DEVICES, LINKS
from vlm_pg.bench.paper.roofline import expected_seconds, fits, roofline
from vlm_pg.bench.results import describe_machine
from vlm_pg.errors import ConfigError
from vlm_pg.files import write_bytes_atomic

FORMAT = 1
WHAT = "counted, not measured: no device ran any of this; times are lower bounds by published peaks, and expected ones"
# Of a whole step.
_PARTS_OF = {"vision": ("tower",), "rollout": ("prefill", "steps"), "reference": ("reference",), "update": ("update",)}
_OF_SPEC = ("model", "work", "point", "contestant")
_OF_RANKS = ("sequence_ranks", "sequence_rank")


def new_record(settings: dict[str, Any], command: str, links: bool = False) -> dict[str, Any]:
    """A file without entries; ``links``: with what devices send each other something over."""
    head = {"format": FORMAT, "measurement": "paper", "what": WHAT, "commands": [command]}
    devices = {name: asdict(device) for name, device in DEVICES.items()}
    head |= {"machine": describe_machine(), "settings": settings, "devices": devices}
    if links:
        head["links"] = {name: asdict(link) for name, link in LINKS.items()}
    return {**head, "entries": []}


def entry_of(spec: dict[str, Any], found: dict[str, Any], launch_seconds: float) -> dict[str, Any]:
    """What was counted of a specification, with its rooflines."""
    entry = {key: spec[key] for key in (*_OF_SPEC, *(key for key in _OF_RANKS if key in spec))}
    if "not_counted" in found:
        return entry | {"not_counted": found["not_counted"]}
    entry |= found
    entry["roofline"] = {
        name: roof | {"fits": fits(found["weights_bytes"], found["peak_bytes"], DEVICES[name])}
        for name, roof in _rooflines(found, spec["dtype"], launch_seconds).items()
    }
    if phases := found.get("phases"):
        entry["phases"] = {
            name: phase | {"roofline": _rooflines(_with_parts(name, phase, found), spec["dtype"], launch_seconds)}
            for name, phase in phases.items()
        }
        for name, roof in entry["roofline"].items():
            # One after the other, each under its own roof.
            roof["seconds"] = sum(phase["roofline"][name]["seconds"] for phase in entry["phases"].values())
    if middle := found.get("middle"):
        one = _of_host(middle["launches"], {name: fewer / count for name, (fewer, count) in _replayed(found).items()})
        entry["middle_roofline"] = {
            name: roofline(middle, one[name], device, spec["dtype"], launch_seconds)
            | {"expected_seconds": expected_seconds(middle, one[name], device, spec["dtype"])}
            for name, device in DEVICES.items()
        }
    return entry


def _with_parts(name: str, phase: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A phase of a whole step with what ``_expected`` needs of it."""
    parts = {part: found["parts"][part] for part in _PARTS_OF[name] if part in found["parts"]}
    return phase | {"parts": parts, "middle": found.get("middle"), "eager_steps": found.get("eager_steps", 0)}


def _rooflines(found: dict[str, Any], dtype: str, launch_seconds: float) -> dict[str, dict[str, Any]]:
    """By device; what a graph replays is one launch."""
    counts, fewer = found["counts"], {name: fewer for name, (fewer, _) in _replayed(found).items()}
    of_host = _of_host(counts["launches"], fewer)
    return {
        name: roofline(counts, of_host[name], device, dtype, launch_seconds, LINKS[name])
        | {"expected_seconds": _expected(found, fewer.get(name, 0), name, dtype)}
        for name, device in DEVICES.items()
    }


def _expected(found: dict[str, Any], fewer: float, name: str, dtype: str) -> float:
    """Part after part, and what steps take longer before they are recorded."""
    device, seconds = DEVICES[name], 0.0
    for part, counts in found["parts"].items():
        of_host = counts["launches"] - (fewer if part == "steps" else 0)
        seconds += expected_seconds(counts, of_host, device, dtype, LINKS[name])
    if fewer and (middle := found.get("middle")):
        eager, replayed = (expected_seconds(middle, launches, device, dtype) for launches in (middle["launches"], 0))
        seconds += found.get("eager_steps", 0) * (eager - replayed)
    return seconds


def _of_host(launches: float, fewer: dict[str, float]) -> dict[str, float]:
    """By device how often the host launches something."""
    return {name: launches - fewer.get(name, 0) for name in DEVICES}


def _replayed(found: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """By device on which steps are replayed: how many fewer launches that makes, and of how many replays."""
    captured = found.get("captured_launches", 0)
    return {name: (captured - count, count) for name, count in found.get("replays", {}).items() if count}


def write_record(record: dict[str, Any], path: Path) -> None:
    """In one move, so that a killed run leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, (json.dumps(record, indent=1) + "\n").encode())


def check_new(paths: Sequence[Path | None]) -> None:
    """Raise ConfigError for a file that is there already."""
    for path in paths:
        if path is not None and path.exists():
            raise ConfigError(f"{path} exists. Give another file, or move this one away.")

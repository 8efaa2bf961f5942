"""What ``vlm-pg bench paper`` counts, beside what was measured of the same contestants at the same points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_pg.bench.paper.devices import ALL, device_called
from vlm_pg.bench.paper.roofline import roofline
from vlm_pg.gpu_check.measurements import LORA_RANK
from vlm_pg.gpu_check.reading import Reading, read_json

FORMAT = 1
# What tells a point from others, in files of all three.
_POINT = ("frames", "prefix", "generations", "response", "new_tokens", "groups")
# Of a roofline.
_LEAST = ("seconds", "roof")


def read_counted(papers: Sequence[Path], folder: Path) -> Reading:
    """A row for each entry of the files of ``bench paper``, whatever was measured of it.

    ``measured``: seconds, bytes and seconds of a decoded token, or None, with ``not_measured`` why. ``counted``: FLOPs,
    bytes, launches, waits, peak memory (``peak_is_least``: it follows from shallower models), and for each device the
    least time with the roof that binds; of a decode step, too. ``device``: on which it was measured, where its peaks
    are known; then ``times_least`` and ``decode_times_least`` say how many times the least it took. ``peak_share``:
    measured by counted peak. Of a whole step ``phases``: of each its least times, counted peak memory, and measured
    seconds.

    Args:
        papers: files of ``bench paper``.
        folder: with ``environment.json`` and files of ``bench step`` and ``bench rollout``.
    """
    found = [record for path in papers if isinstance(record := read_json(path), dict)]
    if not found:
        return Reading(problem="it wrote no result")
    problems = [f"a file has format {one.get('format')!r}, not {FORMAT}" for one in found if one["format"] != FORMAT]
    if len(found) < len(papers):
        problems.append(f"{len(found)} of {len(papers)} files can be read")
    if problems:
        return Reading(problem="; ".join(problems))
    gpu = _gpu(folder)
    device = device_called(gpu)
    files = [data for path in sorted(folder.glob("*.json")) if _is_measured(data := read_json(path))]
    rows = [_row(entry, record["settings"], files, device) for record in found for entry in record["entries"]]
    remarks = []
    if gpu and device is None:
        remarks.append(f"no published peaks of {gpu} are known here: least times are those of other devices")
    remarks += [f"not counted: {_words(row)}: {row['not_counted']}" for row in rows if "not_counted" in row]
    return Reading({"beside": rows, "device": device}, "", remarks)


def _row(entry: dict[str, Any], settings: dict[str, Any], files: list[dict[str, Any]], device: str | None) -> Any:
    point = {key: entry["point"][key] for key in _POINT if key in entry["point"]}
    row = {"measurement": entry["work"], "model": entry["model"], "contestant": entry["contestant"], "point": point}
    measured, why = _measured(entry, settings, files)
    row |= {"measured": measured, "not_measured": why}
    if "not_counted" in entry:
        return row | {"not_counted": entry["not_counted"]}
    counts, least = entry["counts"], _least(entry, "counts", "roofline", settings, device)
    decode = _least(entry, "middle", "middle_roofline", settings, device) if entry.get("middle") else {}
    row["counted"] = {
        "flops": sum(counts["flops"].values()),
        "bytes": sum(counts["bytes"].values()),
        "launches": counts["launches"],
        "waits": sum(counts["waits"].values()),
        "weights_bytes": entry["weights_bytes"],
        "peak_bytes": entry["peak_bytes"],
        "peak_is_least": entry["work"] != "rollout" and bool(entry.get("layers_counted")),
        "least": least,
        "least_decode": decode,
    }
    of = measured or {}
    seconds = of.get("phases") or {}
    row["phases"] = {
        name: {
            "seconds": seconds.get(name),
            "least": _least(phase, "counts", "roofline", settings, device),
            "peak_bytes": phase["peak_bytes"],
        }
        for name, phase in (entry.get("phases") or {}).items()
    }
    return row | {
        "device": device,
        "times_least": _ratio(of.get("seconds"), least.get(device or "", {}).get("seconds")),
        "decode_times_least": _ratio(of.get("decode_seconds"), decode.get(device or "", {}).get("seconds")),
        "peak_share": _ratio(of.get("peak_bytes"), entry["peak_bytes"]),
    }


def _least(
    entry: dict[str, Any], counts: str, rooflines: str, settings: dict[str, Any], device: str | None
) -> dict[str, dict[str, Any]]:
    """By device; that of the measured one as well, where ``bench paper`` has no roofline of it."""
    known = entry[rooflines]
    if device is not None and device not in known:
        # The host's seconds are no device's: launches times the time of one.
        launching = next(iter(known.values()))["launch_seconds"]
        known = known | {device: roofline(entry[counts], launching, ALL[device], settings["dtype"], 1.0)}
    return {name: {key: one[key] for key in _LEAST} for name, one in known.items()}


def _measured(
    entry: dict[str, Any], settings: dict[str, Any], files: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str]:
    """Figures, or None and why there are none."""
    name = entry["contestant"]
    if entry["work"] == "grpo-step":
        return _measured_step(entry, settings, files)
    for data in files:
        if "sampled_tokens" in data or not _same(entry, settings, data):
            continue
        for at in data.get("points") or []:
            if not _is_at(entry, at):
                continue
            if one := (at.get("contestants") or {}).get(name):
                if other := _other_layers(settings, one):
                    return None, other
                times = {"seconds": one["median_seconds"], "decode_seconds": one.get("decode_seconds_per_token")}
                return times | {"peak_bytes": one.get("peak_bytes")}, ""
            if why := (at.get("failed") or {}).get(name):
                return None, str(why)
        for left_out in data.get("skipped") or []:
            if left_out.get("contestant") == name and _is_at(entry, left_out):
                return None, str(left_out.get("reason"))
    return None, "not measured"


def _measured_step(
    entry: dict[str, Any], settings: dict[str, Any], files: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str]:
    """Of the files of ``grpo_step.py``, whose peak is taken above what stood there before."""
    wanted = [entry["model"], *(entry["point"][key] for key in ("frames", "generations", "new_tokens"))]
    as_counted = (settings["checkpointing"], settings["lora"]) == (True, LORA_RANK)
    for data in files:
        if not as_counted or [data.get(key) for key in ("model", "frames", "generations", "new_tokens")] != wanted:
            continue
        if why := data.get("failed") or _other_layers(settings, data):
            return None, str(why)
        phases = dict(data["seconds"])
        peak = None if data.get("peak_bytes") is None else data["peak_bytes"] - (data.get("before_bytes") or 0)
        return {"seconds": phases.pop("step"), "decode_seconds": None, "phases": phases, "peak_bytes": peak}, ""
    return None, "not measured"


def _is_at(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(other.get(key) == entry["point"].get(key) for key in _POINT)


def _same(entry: dict[str, Any], settings: dict[str, Any], data: dict[str, Any]) -> bool:
    """Whether a file's settings are those that were counted; ``bench`` trains all weights."""
    of = data.get("settings") or {}
    keys = ("dtype", "checkpointing") if entry["work"] == "step" else ("dtype",)
    return (
        (data["measurement"], of.get("model")) == (entry["work"], entry["model"])
        and all(of.get(key) == settings[key] for key in keys)
        and not (of.get("ragged") or settings["lora"])
    )


def _other_layers(settings: dict[str, Any], measured: dict[str, Any]) -> str:
    """Why they are not comparable: ``bench`` writes what of liger-kernel was on, which may be nothing."""
    on = bool(measured.get("liger"))
    return "" if on == settings["liger"] else f"measured {'with' if on else 'without'} liger-kernel, counted otherwise"


def _is_measured(data: Any) -> bool:
    return isinstance(data, dict) and (data.get("measurement") in ("step", "rollout") or "sampled_tokens" in data)


def _gpu(folder: Path) -> str | None:
    """What torch calls the GPU of the run."""
    found = read_json(folder / "environment.json")
    device = found.get("device") if isinstance(found, dict) else None
    return device.get("name") if isinstance(device, dict) and device.get("type") == "cuda" else None


def _ratio(measured: float | None, counted: float | None) -> float | None:
    return measured / counted if measured is not None and counted else None


def _words(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['measurement']} {tuple(row['point'].values())}, {row['contestant']}"

"""Counts of ``scripts.bench.paper``, beside the figures measured of the same contestants at the same points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.gpu_check.reading import Reading, read_json
from vlm_pg.plan.devices import DEVICES, GIB, Device

FORMAT = 2
_POINT = ("prefix", "generations", "response", "new_tokens", "groups")
# GPUs of other variants, which may be measured; NVIDIA's data sheets, half of figures with sparsity.
ALL_DEVICES = DEVICES | {
    "A100 80GB PCIe": Device({2: 312e12, 4: 19.5e12}, 1.935e12, 80 * GIB, "A100, 80GB PCIe", ("A100 80GB PCIe",)),
    "A100 40GB": Device(
        {2: 312e12, 4: 19.5e12}, 1.555e12, 40 * GIB, "A100, 40GB", ("A100-SXM4-40GB", "A100-PCIE-40GB")
    ),
    "H100 PCIe": Device({2: 756e12, 4: 51e12}, 2.0e12, 80 * GIB, "H100, PCIe", ("H100 PCIe",)),
    "H100 NVL": Device({2: 835e12, 4: 60e12}, 3.9e12, 94 * 10**9, "H100, NVL", ("H100 NVL",)),
    "H200 NVL": Device({2: 835e12, 4: 60e12}, 4.8e12, 141 * 10**9, "H200, NVL", ("H200 NVL",)),
}


def device_called(name: str | None) -> str | None:
    """The key in ``ALL_DEVICES`` of the GPU that the driver calls so, None where it has none.

    The whole name counts: a slice of a card (MIG), a card for laptops or an RTX 4090 D has other peaks.
    """
    called = (name or "").removeprefix("NVIDIA ").strip()
    return next((key for key, device in ALL_DEVICES.items() if called in device.driver_names), None)


def read_counted(papers: Sequence[Path], folder: Path) -> Reading:
    """A row for each entry of the files of ``scripts.bench.paper``, whether it was measured or not.

    ``measured``: seconds, peak bytes and seconds of a decoded token, or None, with ``not_measured`` why. ``device``:
    the one it was measured on, where its peaks are known; then ``times_least`` and ``decode_times_least`` are ratios of
    measured and least seconds. ``peak_share``: of measured and counted peak.

    Args:
        papers: files of ``scripts.bench.paper``.
        folder: with ``environment.json`` and files of measurements.
    """
    found = [record for path in papers if isinstance(record := read_json(path), dict)]
    if not found:
        return Reading(problem="it wrote no result")
    problems = [f"a file has format {one.get('format')!r}, not {FORMAT}" for one in found if one["format"] != FORMAT]
    if len(found) < len(papers):
        problems.append(f"{len(found)} of {len(papers)} files can be read")
    if problems:
        return Reading(problem="; ".join(problems))
    environment = read_json(folder / "environment.json")
    on = (environment.get("device") if isinstance(environment, dict) else None) or {}
    gpu = on.get("name") if on.get("type") == "cuda" else None
    device = device_called(gpu)
    files = [
        data
        for path in sorted(folder.glob("*.json"))
        if isinstance(data := read_json(path), dict) and data.get("measurement") in ("step", "rollout")
    ]
    rows = [_row(entry, record["settings"], files, device) for record in found for entry in record["entries"]]
    remarks = []
    if gpu and device is None:
        remarks.append(f"no published peaks of {gpu} are known here: least times are those of other devices")
    for row in rows:
        if "not_counted" in row:
            point = tuple(row["point"].values())
            words = f"{row['model']}, {row['measurement']} {point}, {row['contestant']}"
            remarks.append(f"not counted: {words}: {row['not_counted']}")
    return Reading({"beside": rows, "device": device}, "", remarks)


def _row(entry: dict[str, Any], settings: dict[str, Any], files: list[dict[str, Any]], device: str | None) -> Any:
    point = {key: entry["point"][key] for key in _POINT if key in entry["point"]}
    row = {"measurement": entry["work"], "model": entry["model"], "contestant": entry["contestant"], "point": point}
    measured, why = _measured(entry, settings, files)
    row |= {"measured": measured, "not_measured": why}
    if "not_counted" in entry:
        return row | {"not_counted": entry["not_counted"]}
    counts, least, decode = entry["counts"], entry["least"], (entry.get("decode_step") or {}).get("least", {})
    row["counted"] = {
        "flops": sum(counts["flops"].values()),
        "bytes": sum(counts["bytes"].values()),
        "launches": counts["launches"],
        "waits": sum(counts["waits"].values()),
        "peak_bytes": entry["peak_bytes"],
        "least": least,
        "least_decode": decode,
    }
    of = measured or {}
    return row | {
        "device": device,
        "times_least": _ratio(of.get("seconds"), least.get(device or "", {}).get("seconds")),
        "decode_times_least": _ratio(of.get("decode_seconds"), decode.get(device or "", {}).get("seconds")),
        "peak_share": _ratio(of.get("peak_bytes"), entry["peak_bytes"]),
    }


def _measured(
    entry: dict[str, Any], settings: dict[str, Any], files: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str]:
    """Figures, or None and why there are none."""
    name = entry["contestant"]
    for data in files:
        if not _same(entry, settings, data):
            continue
        for at in data.get("points") or []:
            if not _is_at(entry, at):
                continue
            if one := (at.get("contestants") or {}).get(name):
                if (on := bool(one.get("liger"))) != settings["liger"]:
                    return None, f"measured {'with' if on else 'without'} liger-kernel, counted otherwise"
                times = {"seconds": one["median_seconds"], "decode_seconds": one.get("decode_seconds_per_token")}
                return times | {"peak_bytes": one.get("peak_bytes")}, ""
            if why := (at.get("failed") or {}).get(name):
                return None, str(why)
        for left_out in data.get("skipped") or []:
            if left_out.get("contestant") == name and _is_at(entry, left_out):
                return None, str(left_out.get("reason"))
    return None, "not measured"


def _is_at(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(other.get(key) == entry["point"].get(key) for key in _POINT)


def _same(entry: dict[str, Any], settings: dict[str, Any], data: dict[str, Any]) -> bool:
    """Whether a file was measured with the settings that were counted; contestants train all weights."""
    of = data.get("settings") or {}
    keys = ("dtype", "checkpointing") if entry["work"] == "step" else ("dtype",)
    return (
        (data["measurement"], of.get("model")) == (entry["work"], entry["model"])
        and all(of.get(key) == settings[key] for key in keys)
        and not of.get("ragged")
    )


def _ratio(measured: float | None, counted: float | None) -> float | None:
    return measured / counted if measured is not None and counted else None

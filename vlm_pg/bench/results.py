"""The file of raw numbers: written after every point, read again to go on or to draw."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlm_pg.bench.grid import Point
from vlm_pg.errors import ConfigError
from vlm_pg.files import write_bytes_atomic
from vlm_pg.memory import GIB, host_bytes
from vlm_pg.threads import usable_cores

FORMAT = 2
# What a file may hold: `vlm-pg bench` has a command of each name.
MEASUREMENTS = ("step", "rollout", "eval")
PACKAGES = ("torch", "transformers", "prefix-grouper", "flash-attn")


class Results:
    """Points measured so far, and what was left out and why.

    ``path``: None keeps them in memory only.
    """

    def __init__(self, path: Path | None, data: dict[str, Any]):
        self.path = path
        self.data = data

    @classmethod
    def start(cls, path: Path | None, settings: dict[str, Any], command: str, measurement: str) -> Results:
        """A new file of ``vlm-pg bench MEASUREMENT``; ``settings`` are what all its points have in common.

        Raises:
            ConfigError: there is one already; measurements are not thrown away.
        """
        if path is not None and path.exists():
            raise ConfigError(
                f"{path} exists. Add --resume to measure only what it lacks, or give another file to --out."
            )
        head = {"format": FORMAT, "commands": [command], "machine": describe_machine(), "settings": settings}
        results = cls(path, {**head, "measurement": measurement, "points": [], "skipped": []})
        results.save()  # a run that ends before its first point can be gone on with, too
        return results

    @classmethod
    def resume(cls, path: Path, settings: dict[str, Any], command: str, measurement: str) -> Results:
        """A file that was begun with the same settings, with what was left out of it and why.

        Raises:
            ConfigError: no such file, not one of ours, of another measurement, or other settings.
        """
        data = read_results(path)
        if data["measurement"] != measurement:
            raise ConfigError(
                f"{path} was written by `vlm-pg bench {data['measurement']}`, not by `vlm-pg bench {measurement}`. "
                "Give another file to --out."
            )
        differ = [key for key in settings if data["settings"].get(key) != settings[key]]
        if differ:
            was = ", ".join(f"{key} {data['settings'].get(key)!r} (now {settings[key]!r})" for key in differ)
            raise ConfigError(f"{path} was measured with {was}. Use the same settings, or another file for --out.")
        data["commands"].append(command)
        return cls(path, data)

    def find(self, point: Point) -> dict[str, Any] | None:
        """The measured point, or None."""
        return next((measured for measured in self.data["points"] if _is_at(measured, point)), None)

    def add_point(self, measured: dict[str, Any]) -> None:
        self.data["points"].append(measured)
        self.save()

    def add_skipped(self, point: Point, reasons: Mapping[str, str]) -> None:
        """Write down which contestants were not measured at a point, and why."""
        self.data["skipped"] += [
            {**point.identity, "contestant": name, "reason": reason} for name, reason in reasons.items()
        ]
        self.save()

    def forget_skipped(self, point: Point) -> None:
        """Drop what was left out of a point, because the point is tried again."""
        self.data["skipped"] = [entry for entry in self.data["skipped"] if not _is_at(entry, point)]

    def save(self) -> None:
        """Write the file in one move, so that a killed run leaves a whole one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(self.path, (json.dumps(self.data, indent=1) + "\n").encode())


def _is_at(entry: dict[str, Any], point: Point) -> bool:
    return all(entry[key] == value for key, value in point.identity.items())


def read_results(path: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no file of `vlm-pg bench step`, `rollout` or `eval`."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a file of `vlm-pg bench`: {error}. Check the path.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"{path} has format {found!r}; this release reads format {FORMAT}. Measure again with `vlm-pg bench`."
        )
    if data.setdefault("measurement", "step") not in MEASUREMENTS:
        raise ConfigError(
            f"{path} holds the measurement {data['measurement']!r}; known are {', '.join(MEASUREMENTS)}. Read it with "
            "the release that wrote it."
        )
    return data


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and versions; the GPU where there is one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(host_bytes() / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

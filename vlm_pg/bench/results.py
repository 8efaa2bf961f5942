"""The file of raw numbers: written after every point, read again to go on or to draw."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from vlm_pg.errors import ConfigError

FORMAT = 2
# Settings of `bench step` that must be the same for points to stand in one file.
COMPARABLE = ("model", "dtype", "device", "checkpointing", "ragged", "repeats", "threads")
PACKAGES = ("torch", "transformers", "prefix-grouper", "flash-attn")


class MeasuredPoint(Protocol):
    """A point of a grid."""

    @property
    def identity(self) -> dict[str, int]:
        """What tells this point from the others of a file of results."""
        ...


class Results:
    """Points measured so far, and what was left out and why.

    ``path``: None keeps them in memory only.
    """

    def __init__(self, path: Path | None, data: dict[str, Any]):
        self.path = path
        self.data = data

    @classmethod
    def start(cls, path: Path | None, settings: dict[str, Any], command: str, measurement: str = "step") -> Results:
        """A new file of ``vlm-pg bench MEASUREMENT``; ``settings`` are what all its points have in common.

        Raises:
            ConfigError: there is one already; measurements are not thrown away.
        """
        if path is not None and path.exists():
            raise ConfigError(
                f"{path} exists. Add --resume to measure only what it lacks, or give another file to --out."
            )
        head = {"format": FORMAT, "commands": [command], "machine": describe_machine(), "settings": settings}
        return cls(path, {**head, "measurement": measurement, "points": [], "skipped": []})

    @classmethod
    def resume(cls, path: Path, settings: dict[str, Any], command: str, measurement: str = "step") -> Results:
        """A file that was begun with the same settings; what was skipped is tried again.

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
        data["skipped"] = []
        return cls(path, data)

    def find(self, point: MeasuredPoint) -> dict[str, Any] | None:
        """The measured point, or None."""
        identity = point.identity
        return next((p for p in self.data["points"] if all(p[key] == identity[key] for key in identity)), None)

    def add_point(self, measured: dict[str, Any]) -> None:
        self.data["points"].append(measured)
        self.save()

    def add_skipped(self, point: MeasuredPoint, contestant: str, reason: str) -> None:
        """Write down that a contestant was not measured at a point."""
        self.data["skipped"].append({**point.identity, "contestant": contestant, "reason": reason})
        self.save()

    def save(self) -> None:
        """Write the file in one move, so that a killed run leaves a whole one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(self.path.suffix + ".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.path)


def read_results(path: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no file of `vlm-pg bench step` or `vlm-pg bench rollout`."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a file of `vlm-pg bench`: {error}. Check the path.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"{path} has format {found!r}; this release reads format {FORMAT}. Measure again with `vlm-pg bench`."
        )
    data.setdefault("measurement", "step")
    return data


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and versions; the GPU where there is one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


def machine_words(results: dict[str, Any]) -> str:
    """The GPU, or the processor and the number of threads, that a file was measured with."""
    settings, machine = results["settings"], results["machine"]
    if settings["device"] == "cuda":
        return str(machine.get("gpu"))
    return f"{machine['processor']}, threads: {settings['threads']}"


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

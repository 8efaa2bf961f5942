"""A run over the points of a measurement: one process per point, its numbers printed and written after every point."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from vlm_pg.bench.work import Point
from vlm_pg.errors import ConfigError
from vlm_pg.files import write_json_atomic
from vlm_pg.memory import GIB, host_bytes
from vlm_pg.models.memory_sizes import LanguageShape
from vlm_pg.plan.shape import PUBLISHED
from vlm_pg.threads import usable_cores
from vlm_pg.versions import version_of

FORMAT = 2
PACKAGES = ("torch", "transformers", "prefix-grouper", "flash-attn")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
# A point that takes longer hangs.
PATIENCE_SECONDS = 2 * 3600.0
# On a CPU the main thread computes all the time; with a core for less than this share of it, others were computing too.
UNDISTURBED_SHARE = 0.9

# Models with random weights. The first two are for CPUs.
SIZES: dict[str, LanguageShape] = {
    "small": LanguageShape(256, 4, 4, 2, 64, 704, 4096),
    "mid": LanguageShape(512, 6, 8, 2, 64, 1408, 4096),
    "3b": PUBLISHED["Qwen2.5-VL-3B"],
    "7b": PUBLISHED["Qwen2.5-VL-7B"],
    # Dimensions of Qwen3-VL-8B's language model in Qwen2.5-VL's classes: without the norms of queries and keys.
    "8b": PUBLISHED["Qwen3-VL-8B"],
}


class CannotRun(Exception):
    """A contestant does not work with this model on this machine; the message says why. The others go on."""


class WorkerKilled(Exception):
    """The measuring process was killed from outside or took far too long; other points can still be measured."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a point.

    ``work``: how much there is to do for it. ``run``: resolved by the measuring process, "package.module:name".
    ``package``: must be installed.
    """

    description: str
    work: Callable[..., Any]
    run: str
    package: str | None = None

    def unavailable_because(self) -> str | None:
        """Why it cannot run here at all, or None."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"the package {self.package} is not installed (pip install {self.package.replace('_', '-')})"


PointT = TypeVar("PointT", bound=Point)


class PointsRun(ABC, Generic[PointT]):
    """One run over a list of points.

    ``contestants_known``: ours first. ``gain_key``: of the gains over a contestant in its entry. ``comparable``:
    options that must be the same for points in one file. ``case``: "package.module:name" of the point's work in the
    measuring process. ``description``, ``epilog``: of ``--help``.
    """

    measurement: ClassVar[str]
    command: ClassVar[tuple[str, ...]]
    contestants_known: ClassVar[Mapping[str, Contestant]]
    gain_key: ClassVar[str]
    comparable: ClassVar[tuple[str, ...]] = ("model", "dtype", "device", "repeats", "threads")
    case: ClassVar[str]
    description: ClassVar[str]
    epilog: ClassVar[str]
    default_points: ClassVar[tuple[str, ...]]
    point_form: ClassVar[str]

    def __init__(self, arguments: argparse.Namespace, results: Results):
        self.arguments, self.results = arguments, results
        self.shape, self.element_bytes = SIZES[arguments.model], ELEMENT_BYTES[arguments.dtype]
        reasons = {name: self.contestants_known[name].unavailable_because() for name in arguments.contestants}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason}
        self.contestants = [name for name in arguments.contestants if name not in self.unavailable]

    @classmethod
    def main(cls, argv: Sequence[str]) -> int:
        """Run from the command line; see ``--help``."""
        arguments = checked_options(cls.parser().parse_args(argv))
        points = cls.points(arguments)
        settings = {key: getattr(arguments, key) for key in cls.comparable}
        begin = Results.resume if arguments.resume else Results.start
        run = cls(arguments, begin(arguments.out, settings, shlex.join([*cls.command, *argv]), cls.measurement))
        run.measure(points)
        run.finish()
        return 0

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        """The command line."""
        names = "\n".join(f"  {name}: {one.description}" for name, one in cls.contestants_known.items())
        parser = argparse.ArgumentParser(
            prog=" ".join(cls.command),
            description=cls.description,
            epilog=f"contestants:\n{names}\n\n{cls.epilog}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        known = list(cls.contestants_known)
        add = parser.add_argument
        points = " ".join(cls.default_points)
        add(
            "--points", nargs="+", metavar="POINT", default=list(cls.default_points), help=f"{cls.point_form}; {points}"
        )
        add("--contestants", nargs="+", choices=known, default=known, metavar="NAME", help="default: all; see below")
        add("--model", choices=sorted(SIZES), default="small", help="shape of the random model")
        add("--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights and activations")
        add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
        add("--repeats", type=int, default=3, help="timed runs of each contestant, after one warm-up")
        add("--threads", type=int, default=None, help="CPU threads; default: all cores this process may use")
        add("--no-memory", dest="memory", action="store_false", help="leave out the memory runs of a CPU")
        add("--out", type=Path, help="file for the raw numbers, JSON, written after every point")
        add("--resume", action="store_true", help="go on with the file --out: measure only the points it lacks")
        return parser

    @classmethod
    @abstractmethod
    def points(cls, arguments: argparse.Namespace) -> list[PointT]:
        """Parsed ``--points``."""

    @abstractmethod
    def medians(self, name: str, point: PointT, numbers: dict[str, Any]) -> dict[str, Any]:
        """Figures of a contestant's entry, from its raw numbers."""

    @abstractmethod
    def gain(self, name: str, point: PointT, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        """Ours against another contestant, measured and by counting, from both entries."""

    @abstractmethod
    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        """Printed lines of a contestant at a point."""

    def contestants_at(self, point: PointT) -> list[str]:
        """Contestants that differ from the others at a point."""
        return self.contestants

    def prepared(self, point: PointT, contestants: Sequence[str]) -> dict[str, Any]:
        """Make files that the measurement of a point needs; further entries of the specification."""
        return {}

    def measure(self, points: Sequence[PointT]) -> None:
        """Measure each point once; contestants that are left out are written down."""
        todo = [point for point in points if self.results.find(point) is None]
        if done := len(points) - len(todo):
            print(f"{done} of {len(points)} points are in {self.results.path} already")
        for index, point in enumerate(todo):
            print(f"[{index + 1}/{len(todo)}] {point}", flush=True)
            self.results.forget_skipped(point)
            self.results.add_skipped(point, self.unavailable)
            self._measure(point)

    def finish(self) -> None:
        """Print contestants that were left out and why, and where the numbers are."""
        if skipped := self.results.data["skipped"]:
            print(f"left out ({len(skipped)}):")
        for entry in skipped:
            point = ",".join(str(value) for key, value in entry.items() if key not in ("contestant", "reason"))
            print(f"  {point:18} {entry['contestant']}: {entry['reason']}")
        if self.arguments.out:
            self.results.save()
            print(f"raw numbers: {self.arguments.out}")

    def summarise(self, point: PointT, measured: dict[str, Any]) -> dict[str, Any]:
        """The record of a point: raw numbers per contestant and, beside each, the gains of ours."""
        entries = {
            name: {**numbers, **self.medians(name, point, numbers)} for name, numbers in measured["contestants"].items()
        }
        ours = next(iter(self.contestants_known))
        for name, entry in entries.items():
            if ours in entries and name != ours:
                entry[self.gain_key] = self.gain(name, point, entry, entries[ours])
        return {**point.record, "contestants": entries, "failed": measured["failed"]}

    def lines(self, record: dict[str, Any]) -> list[str]:
        """Printed lines of a measured point."""
        lines = [line for name, entry in record["contestants"].items() for line in self.entry_lines(name, entry)]
        # Processor seconds are measured on CPUs only.
        busy = [
            name
            for name, entry in record["contestants"].items()
            if sum(entry.get("cpu_seconds", entry["seconds"])) < UNDISTURBED_SHARE * sum(entry["seconds"])
        ]
        if busy:
            words = "other programs were busy: {} had a core only part of the time; measure again"
            lines.append(f"  {words.format(', '.join(busy))}")
        return lines + [f"  {name:24} failed: {reason}" for name, reason in record["failed"].items()]

    def _measure(self, point: PointT) -> None:
        names = self.contestants_at(point)
        spec = {key: getattr(self.arguments, key) for key in (*self.comparable, "memory")} | point.record
        spec |= self.prepared(point, names) | {"case": self.case}
        spec["contestants"] = {name: self.contestants_known[name].run for name in names}
        try:
            measured = run_worker(spec, PATIENCE_SECONDS)
        except WorkerKilled as killed:
            self.results.add_skipped(point, dict.fromkeys(names, str(killed)))
            print(f"  no result: {killed}", flush=True)
            return
        record = self.summarise(point, measured)
        self.results.add_skipped(point, measured["failed"])
        self.results.add_point(record)
        print("\n".join(self.lines(record)), flush=True)


def gib_words(num_bytes: float | None, decimals: int) -> str:
    """`` 1.25 GiB``, or as much room."""
    return " " * 12 if num_bytes is None else f"{num_bytes / GIB:8.{decimals}f} GiB"


def memory_words(ratio: float) -> str:
    """Theirs over ours, in words."""
    return f"{ratio:.2f}x less" if ratio >= 1 else f"{1 / ratio:.2f}x more"


def checked_options(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with device and threads filled in.

    Raises:
        ConfigError: options that contradict each other, or a device that is not there.
    """
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}; at least 1 timed run is needed.")
    if arguments.resume and arguments.out is None:
        raise ConfigError("--resume goes on with a file; give it with --out FILE.json.")
    if arguments.device != "cpu":
        import torch

        if arguments.device == "auto":
            arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        elif not torch.cuda.is_available():
            raise ConfigError("--device is cuda, but torch sees no GPU. Use --device cpu, or see `vlm-pg doctor`.")
    if arguments.threads is None:
        arguments.threads = usable_cores()
    return arguments


def run_worker(spec: dict[str, Any], patience_seconds: float) -> dict[str, Any]:
    """Measure one point in a fresh process: ``python -m vlm_pg.bench.worker SPEC.json RESULT.json PARENT``.

    It ends with this process, also where a signal kills this one.

    Raises:
        WorkerKilled: killed by a signal, or not done within ``patience_seconds``.
        RuntimeError: it raised; the message ends with its traceback.
    """
    threads = str(spec["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        spec_path, result_path, log_path = (Path(folder, name) for name in ("spec.json", "result.json", "log"))
        spec_path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "vlm_pg.bench.worker", str(spec_path), str(result_path), str(os.getpid())]
        with log_path.open("w") as log:
            process = subprocess.Popen(command, env=environment, stderr=log)
            try:
                code = process.wait(patience_seconds)
            except subprocess.TimeoutExpired as error:
                raise WorkerKilled(f"not done after {patience_seconds / 60:.0f} min, stopped") from error
            finally:
                process.kill()
                process.wait()
        if code < 0:
            raise WorkerKilled(f"killed by signal {-code} (9: mostly out of memory)")
        if code:
            raise RuntimeError(f"Measuring failed with exit code {code}:\n{log_path.read_text()[-4000:]}")
        return json.loads(result_path.read_text())


class Results:
    """The file of raw numbers: points measured so far, and contestants left out with the reason.

    ``path``: None keeps them in memory only.
    """

    def __init__(self, path: Path | None, data: dict[str, Any]):
        self.path, self.data = path, data

    @classmethod
    def start(cls, path: Path | None, settings: dict[str, Any], command: str, measurement: str) -> Results:
        """A new file; ``settings``: common to all its points.

        Raises:
            ConfigError: there is one already; measurements are not thrown away.
        """
        if path is not None and path.exists():
            raise ConfigError(
                f"{path} exists. Add --resume to measure only what it lacks, or give another file to --out."
            )
        head = {"format": FORMAT, "commands": [command], "machine": describe_machine(), "settings": settings}
        results = cls(path, {**head, "measurement": measurement, "points": [], "skipped": []})
        results.save()  # a run that ends before its first point can be resumed, too
        return results

    @classmethod
    def resume(cls, path: Path, settings: dict[str, Any], command: str, measurement: str) -> Results:
        """A file that was begun with the same settings.

        Raises:
            ConfigError: no such file, not one of ours, of another measurement, or other settings.
        """
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a file of `vlm-pg bench`: {error}. Check the path.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ConfigError(
                f"{path} has format {found!r}; this release reads format {FORMAT}. Measure again with `vlm-pg bench`."
            )
        if data.setdefault("measurement", "step") != measurement:
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
        """Write down contestants that were not measured at a point, and why."""
        skipped = [{**point.identity, "contestant": name, "reason": reason} for name, reason in reasons.items()]
        self.data["skipped"] += skipped
        self.save()

    def forget_skipped(self, point: Point) -> None:
        """Drop the reasons of a point that is tried again."""
        self.data["skipped"] = [entry for entry in self.data["skipped"] if not _is_at(entry, point)]

    def save(self) -> None:
        """Write the file in one move, so that a killed run leaves a whole one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.path, self.data)


def _is_at(entry: dict[str, Any], point: Point) -> bool:
    return all(entry[key] == value for key, value in point.identity.items())


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and versions; the GPU where there is one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(host_bytes() / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
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

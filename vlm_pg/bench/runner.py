"""A run over the points of a measurement: plans, starts one process per point, prints and keeps what they found."""

from __future__ import annotations

import argparse
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

from vlm_pg.bench.budget import CPU_THREAD_RATE, GPU_RATE, Estimator, Plan, plan_point
from vlm_pg.bench.contestant import Contestant
from vlm_pg.bench.drawing import write_figure
from vlm_pg.bench.grid import PointT
from vlm_pg.bench.options import checked_options
from vlm_pg.bench.process import WorkerKilled, run_worker
from vlm_pg.bench.results import Results
from vlm_pg.bench.shapes import SIZES
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB, free_host_bytes

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
# A point that takes this many times what was expected, and at least ten minutes, hangs.
PATIENCE, LEAST_PATIENCE_SECONDS = 6.0, 600.0
# On a CPU the main thread computes all the time; if it had a core for less than this share, others were computing too.
UNDISTURBED_SHARE = 0.9


class PointsRun(ABC, Generic[PointT]):
    """One run over a list of points: what it costs is learnt on the way.

    ``contestants_known``: in the order in which they are measured when time is short, ours first. ``gain_key``: under
    which the entry of another contestant has what ours gains over it. ``comparable``: options that must be the same for
    points to stand in one file. ``case``: what the measuring process makes of a point, "package.module:name";
    ``counted``: what counts a contestant's work there, the same way, or None.
    """

    measurement: ClassVar[str]
    contestants_known: ClassVar[Mapping[str, Contestant]]
    gain_key: ClassVar[str]
    comparable: ClassVar[tuple[str, ...]]
    case: ClassVar[str]
    counted: ClassVar[str | None] = None

    def __init__(self, arguments: argparse.Namespace, results: Results):
        self.arguments = arguments
        self.results = results
        self.shape, self.element_bytes = SIZES[arguments.model], ELEMENT_BYTES[arguments.dtype]
        first_rate = CPU_THREAD_RATE * arguments.threads if arguments.device == "cpu" else GPU_RATE
        self.estimator = Estimator(self.flops, self.peak_bytes, first_rate)  # type: ignore[arg-type]
        self.start_seconds = time.monotonic()
        self.runs = 1 + arguments.repeats + (1 if arguments.device == "cpu" and arguments.memory else 0)
        for record in results.data["points"]:
            self._learn(self.point_of(record), record)
        reasons = {name: self.contestants_known[name].unavailable_because() for name in arguments.contestants}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason}
        self.contestants = [name for name in arguments.contestants if name not in self.unavailable]

    @classmethod
    def main(cls, argv: Sequence[str]) -> int:
        """Run from the command line; see ``--help``."""
        arguments = checked_options(cls.parser().parse_args(argv))
        points = cls.points(arguments)
        settings = {key: getattr(arguments, key) for key in cls.comparable}
        command = shlex.join(["vlm-pg", "bench", cls.measurement, *argv])
        begin = Results.resume if arguments.resume else Results.start
        run = cls(arguments, begin(arguments.out, settings, command, cls.measurement))
        run.measure(points)
        run.finish()
        return 0

    @staticmethod
    @abstractmethod
    def parser() -> argparse.ArgumentParser:
        """The command line."""

    @staticmethod
    @abstractmethod
    def points(arguments: argparse.Namespace) -> list[PointT]:
        """The points that are asked for."""

    @abstractmethod
    def point_of(self, record: dict[str, Any]) -> PointT:
        """The point of a record that stands in the file already."""

    @abstractmethod
    def flops(self, name: str, point: PointT) -> float:
        """Operations of one run of a contestant."""

    @abstractmethod
    def peak_bytes(self, name: str, point: PointT) -> float:
        """Peak memory of one run in bytes, by formula."""

    @abstractmethod
    def medians(self, name: str, point: PointT, numbers: dict[str, Any]) -> dict[str, Any]:
        """What its entry says beside the raw numbers."""

    @abstractmethod
    def gain(self, name: str, point: PointT, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        """How ours compares with another one, and how it could compare, from both entries."""

    @abstractmethod
    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        """What is printed of a contestant at a point."""

    def contestants_at(self, point: PointT) -> list[str]:
        """Who has something to say at a point."""
        return self.contestants

    def prepared(self, point: PointT, contestants: Sequence[str]) -> dict[str, Any]:
        """What must lie ready before a point is measured: further entries of the specification."""
        return {}

    def busy_lines(self, record: dict[str, Any]) -> list[str]:
        """What is printed of a point at which other programs were busy, beside that."""
        return []

    def measure(self, points: Sequence[PointT]) -> None:
        """Measure what fits, each point once; every point and contestant that is left out is written down."""
        points = list(dict.fromkeys(points))
        todo = [point for point in points if self.results.find(point) is None]
        if done := len(points) - len(todo):
            print(f"{done} of {len(points)} points are in {self.results.path} already")
        for index, point in enumerate(todo):
            plan = self._plan(point)
            head = f"[{index + 1}/{len(todo)}] {point}"
            self.results.forget_skipped(point)
            self.results.add_skipped(point, plan.skipped)
            if not plan.contestants:
                print(f"{head}: left out, {next(iter(plan.skipped.values()), 'no contestant can run')}", flush=True)
                continue
            left = sum(self._plan(later).seconds for later in todo[index:])
            print(f"{head}: about {plan.seconds / 60:.1f} min; all that fits: {left / 60:.1f} min", flush=True)
            self._measure(point, plan)

    def finish(self) -> None:
        """Say what was left out and why, and where the numbers are."""
        skipped = self.results.data["skipped"]
        if skipped:
            print(f"left out ({len(skipped)}):")
        for entry in skipped:
            where = ",".join(str(value) for key, value in entry.items() if key not in ("contestant", "reason"))
            print(f"  {where:18} {entry['contestant']}: {entry['reason']}")
        if self.arguments.out:
            self.results.save()
            print(f"raw numbers: {self.arguments.out}")
        if self.arguments.figure:
            # The numbers are safe; `vlm-pg bench figure` can draw them at any time.
            try:
                print(f"figure: {write_figure(self.results.data, self.arguments.figure)}")
            except (ConfigError, OSError) as error:
                print(f"no figure: {error}")

    def summarise(self, point: PointT, measured: dict[str, Any]) -> dict[str, Any]:
        """The record of a point: raw numbers per contestant and, beside each, how ours compares and could compare."""
        entries = {
            name: {**numbers, **self.medians(name, point, numbers)} for name, numbers in measured["contestants"].items()
        }
        ours = next(iter(self.contestants_known))
        for name, entry in entries.items():
            if ours in entries and name != ours:
                entry[self.gain_key] = self.gain(name, point, entry, entries[ours])
        return {**point.record, "contestants": entries, "failed": measured["failed"]}

    def lines(self, record: dict[str, Any]) -> list[str]:
        """What is printed of a measured point."""
        lines = [line for name, entry in record["contestants"].items() for line in self.entry_lines(name, entry)]
        if busy := _disturbed(record):
            words = "other programs were busy: {} had a core only part of the time; measure again"
            lines += [f"  {words.format(', '.join(busy))}", *self.busy_lines(record)]
        return lines + [f"  {name:24} failed: {reason}" for name, reason in record["failed"].items()]

    def _plan(self, point: PointT) -> Plan:
        budget = self.arguments.budget_minutes
        total = None if budget is None else 60 * budget
        left = None if total is None else max(0.0, total - (time.monotonic() - self.start_seconds))
        plan = plan_point(
            point, self.contestants_at(point), self.estimator, self.runs, left, total, self._memory_limit()
        )
        return Plan(plan.contestants, self.unavailable | plan.skipped, plan.seconds)

    def _memory_limit(self) -> float | None:
        if self.arguments.memory_gib is not None:
            return self.arguments.memory_gib * GIB
        try:
            return 0.8 * free_host_bytes() if self.arguments.device == "cpu" else None
        except OSError:  # the system does not say
            return None

    def _measure(self, point: PointT, plan: Plan) -> None:
        spec = {key: getattr(self.arguments, key) for key in (*self.comparable, "memory")} | point.record
        spec |= self.prepared(point, plan.contestants)
        runs = {name: self.contestants_known[name].run for name in plan.contestants}
        counted = self.counted if self.arguments.counts else None
        before = time.monotonic()
        try:
            patience = max(LEAST_PATIENCE_SECONDS, PATIENCE * plan.seconds)
            measured = run_worker(spec | {"case": self.case, "counted": counted, "contestants": runs}, patience)
        except WorkerKilled as killed:
            self.results.add_skipped(point, dict.fromkeys(plan.contestants, str(killed)))
            print(f"  no result: {killed}", flush=True)
            return
        wall_seconds = time.monotonic() - before
        record = self.summarise(point, measured)
        self.results.add_skipped(point, measured["failed"])
        self.results.add_point(record)
        in_runs = sum(self.runs * _run_seconds(entry) for entry in record["contestants"].values())
        self.estimator.start_seconds = max(1.0, wall_seconds - in_runs)
        self._learn(point, record)
        print("\n".join(self.lines(record)), flush=True)

    def _learn(self, point: PointT, record: dict[str, Any]) -> None:
        for name, entry in record["contestants"].items():
            self.estimator.learn(name, point, _run_seconds(entry), entry.get("peak_bytes"))


def _run_seconds(entry: dict[str, Any]) -> float:
    """What one run of a contestant took: of a generation a whole one and one of a single token."""
    return float(entry["median_seconds"] + entry.get("first_token_seconds", 0.0))


def _disturbed(record: dict[str, Any]) -> list[str]:
    """Contestants that had to wait for a core; processor seconds are taken on CPUs only."""
    return [
        name
        for name, entry in record["contestants"].items()
        if sum(entry.get("cpu_seconds", entry["seconds"])) < UNDISTURBED_SHARE * sum(entry["seconds"])
    ]


def gib_words(num_bytes: float | None, decimals: int) -> str:
    """`` 1.25 GiB``, or as much room."""
    return " " * 12 if num_bytes is None else f"{num_bytes / GIB:8.{decimals}f} GiB"


def memory_words(ratio: float) -> str:
    """How much less memory ours takes."""
    return f"{ratio:.2f}x less" if ratio >= 1 else f"{1 / ratio:.2f}x more"

"""A run over the points of a measurement: plans, starts one process per point, prints and keeps what they found."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from vlm_pg.bench.budget import CPU_THREAD_RATE, GPU_RATE, CostEstimator, Plan, plan_point
from vlm_pg.bench.memory import available_bytes
from vlm_pg.bench.options import DEFAULT_MINUTES
from vlm_pg.bench.results import MeasuredPoint, Results
from vlm_pg.errors import ConfigError

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
# A point that takes this many times what was expected, and at least ten minutes, hangs.
PATIENCE, LEAST_PATIENCE_SECONDS = 6.0, 600.0
# Options that reach every measuring process as they are.
SPEC_OPTIONS = ("model", "dtype", "device", "threads", "repeats", "memory")

PointT = TypeVar("PointT", bound=MeasuredPoint)


def checked_options(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with what was left open filled in.

    Raises:
        ConfigError: options that contradict each other, or a device that is not there.
    """
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}; at least 1 timed run is needed.")
    if arguments.budget_minutes is not None and arguments.budget_minutes <= 0:
        raise ConfigError(
            f"--budget-minutes is {arguments.budget_minutes:g}; it must be above 0. Leave it out where --points or "
            "--prefix say what is wanted, to measure all of that."
        )
    if arguments.budget_minutes is None and not arguments.points and not arguments.prefix:
        arguments.budget_minutes = DEFAULT_MINUTES
        print(f"the whole grid, for {DEFAULT_MINUTES} minutes (--budget-minutes)")
    if arguments.resume and arguments.out is None:
        raise ConfigError("--resume goes on with a file; give it with --out FILE.json.")
    if arguments.device != "cpu":
        import torch

        if arguments.device == "auto":
            arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        elif not torch.cuda.is_available():
            raise ConfigError("--device is cuda, but torch sees no GPU. Use --device cpu, or see `vlm-pg doctor`.")
    if arguments.threads is None:
        arguments.threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return arguments


def first_rate(arguments: argparse.Namespace) -> float:
    """Operations per second that are expected before anything is measured."""
    return CPU_THREAD_RATE * arguments.threads if arguments.device == "cpu" else GPU_RATE


class PointsRun(ABC, Generic[PointT]):
    """One run over a list of points: what it costs is learnt on the way.

    ``worker``: module that measures one point in a process of its own.
    """

    worker: str

    def __init__(self, arguments: argparse.Namespace, results: Results, estimator: CostEstimator[PointT]):
        self.arguments = arguments
        self.results = results
        self.estimator = estimator
        self.start_seconds = time.monotonic()
        self.runs = 1 + arguments.repeats + (1 if arguments.device == "cpu" and arguments.memory else 0)
        for record in results.data["points"]:
            self._learn(self._point_of(record), record)
        reasons = {name: self._unavailable_because(name) for name in arguments.contestants}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason}
        self.contestants = [name for name in arguments.contestants if name not in self.unavailable]

    @abstractmethod
    def _unavailable_because(self, contestant: str) -> str | None:
        """Why a contestant cannot run here at all, or None."""

    @abstractmethod
    def _point_of(self, record: dict[str, Any]) -> PointT:
        """The point of a record that stands in the file already."""

    @abstractmethod
    def _point_spec(self, point: PointT) -> dict[str, Any]:
        """What the worker needs to know of a point."""

    @abstractmethod
    def _summarise(self, point: PointT, measured: dict[str, Any]) -> dict[str, Any]:
        """The record of a point from what its worker found."""

    @abstractmethod
    def _lines(self, record: dict[str, Any]) -> list[str]:
        """What is printed of a record."""

    @abstractmethod
    def _run_seconds(self, entry: dict[str, Any]) -> float:
        """What one run of a contestant took, from its entry in a record."""

    def _contestants_at(self, point: PointT) -> list[str]:
        """Who has something to say at a point."""
        return self.contestants

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
            for name, reason in plan.skipped.items():
                self.results.add_skipped(point, name, reason)
            if not plan.contestants:
                print(f"{head}: left out, {next(iter(plan.skipped.values()), 'no contestant can run')}", flush=True)
                continue
            left = sum(self._plan(later).seconds for later in todo[index:])
            print(f"{head}: about {plan.seconds / 60:.1f} min; all that fits: {left / 60:.1f} min", flush=True)
            self._measure(point, plan)

    def print_skipped(self) -> None:
        """List all that was not measured, with reasons."""
        skipped = self.results.data["skipped"]
        if skipped:
            print(f"left out ({len(skipped)}):")
        for entry in skipped:
            where = ",".join(str(value) for key, value in entry.items() if key not in ("contestant", "reason"))
            print(f"  {where:18} {entry['contestant']}: {entry['reason']}")

    def finish(self) -> None:
        """Say what was left out and where the numbers are."""
        self.print_skipped()
        if self.arguments.out:
            self.results.save()
            print(f"raw numbers: {self.arguments.out}")
        if self.arguments.figure:
            self._draw(self.arguments.figure)

    def _draw(self, path: Path) -> None:
        from vlm_pg.bench.figure import write_figure

        # The numbers are safe; `vlm-pg bench figure` can draw them at any time.
        try:
            print(f"figure: {write_figure(self.results.data, path)}")
        except (ConfigError, OSError) as error:
            print(f"no figure: {error}")

    def _plan(self, point: PointT) -> Plan:
        budget = self.arguments.budget_minutes
        total = None if budget is None else 60 * budget
        left = None if total is None else max(0.0, total - (time.monotonic() - self.start_seconds))
        plan = plan_point(
            point, self._contestants_at(point), self.estimator, self.runs, left, total, self._memory_limit()
        )
        return Plan(plan.contestants, self.unavailable | plan.skipped, plan.seconds)

    def _memory_limit(self) -> float | None:
        if self.arguments.memory_gib is not None:
            return self.arguments.memory_gib * 2**30
        free = available_bytes() if self.arguments.device == "cpu" else None
        return None if free is None else 0.8 * free

    def _measure(self, point: PointT, plan: Plan) -> None:
        spec = {key: getattr(self.arguments, key) for key in SPEC_OPTIONS}
        spec |= self._point_spec(point) | {"contestants": plan.contestants}
        before = time.monotonic()
        try:
            measured = run_worker(spec, max(LEAST_PATIENCE_SECONDS, PATIENCE * plan.seconds), self.worker)
        except WorkerKilled as killed:
            for name in plan.contestants:
                self.results.add_skipped(point, name, str(killed))
            print(f"  no result: {killed}", flush=True)
            return
        wall_seconds = time.monotonic() - before
        record = self._summarise(point, measured)
        for name, reason in measured["failed"].items():
            self.results.add_skipped(point, name, reason)
        self.results.add_point(record)
        in_runs = sum(self.runs * self._run_seconds(entry) for entry in record["contestants"].values())
        self.estimator.start_seconds = max(1.0, wall_seconds - in_runs)
        self._learn(point, record)
        print("\n".join(self._lines(record)), flush=True)

    def _learn(self, point: PointT, record: dict[str, Any]) -> None:
        for name, entry in record["contestants"].items():
            self.estimator.learn(name, point, self._run_seconds(entry), entry.get("peak_bytes"))


class WorkerKilled(Exception):
    """The measuring process was killed from outside or took far too long; other points can still be measured."""


def run_worker(spec: dict[str, Any], patience_seconds: float, module: str) -> dict[str, Any]:
    """Measure one point in a fresh process: ``python -m MODULE SPEC.json RESULT.json``.

    Raises:
        WorkerKilled: killed by a signal, or not done within ``patience_seconds``.
        RuntimeError: it raised; the message ends with its traceback.
    """
    threads = str(spec["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        spec_path, result_path, log_path = (Path(folder, name) for name in ("spec.json", "result.json", "log"))
        spec_path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", module, str(spec_path), str(result_path)]
        with log_path.open("w") as log:
            # On Linux the kernel ends a child that measures memory with its parent; elsewhere they are one group.
            own_group = sys.platform != "linux"
            process = subprocess.Popen(command, env=environment, stderr=log, start_new_session=own_group)
            try:
                code = process.wait(patience_seconds)
            except subprocess.TimeoutExpired as error:
                raise WorkerKilled(f"not done after {patience_seconds / 60:.0f} min, stopped") from error
            finally:
                _end(process, own_group)
        if code < 0:
            raise WorkerKilled(f"killed by signal {-code} (9: mostly out of memory)")
        if code:
            raise RuntimeError(f"Measuring failed with exit code {code}:\n{log_path.read_text()[-4000:]}")
        return json.loads(result_path.read_text())


def _end(process: subprocess.Popen[bytes], own_group: bool) -> None:
    """Kill a process that still runs, and what it forked."""
    if process.poll() is None:
        if own_group:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()

"""``vlm-pg bench step``: plans the points, starts one process for each, prints and keeps what they found."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_pg.bench.budget import CPU_THREAD_RATE, GPU_RATE, Estimator, Plan, plan_point
from vlm_pg.bench.grid import PREFIXES, Point, grid_points, parse_points
from vlm_pg.bench.memory import available_bytes
from vlm_pg.bench.options import DEFAULT_MINUTES, step_parser
from vlm_pg.bench.report import point_lines, summarise
from vlm_pg.bench.results import COMPARABLE, Results
from vlm_pg.bench.shapes import SIZES
from vlm_pg.errors import ConfigError

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
# A point that takes this many times what was expected, and at least ten minutes, hangs.
PATIENCE, LEAST_PATIENCE_SECONDS = 6.0, 600.0


def main(argv: Sequence[str]) -> int:
    """Run from the command line; see ``vlm-pg bench step --help``."""
    arguments = checked_options(step_parser().parse_args(argv))
    points = _points(arguments)
    settings = {key: getattr(arguments, key) for key in COMPARABLE}
    command = shlex.join(["vlm-pg", "bench", "step", *argv])
    begin = Results.resume if arguments.resume else Results.start
    run = StepRun(arguments, begin(arguments.out, settings, command))
    run.measure(points)
    run.print_skipped()
    if arguments.out:
        run.results.save()
        print(f"raw numbers: {arguments.out}")
    if arguments.figure:
        from vlm_pg.bench.figure import write_figure

        print(f"figure: {write_figure(run.results.data, arguments.figure)}")
    return 0


def checked_options(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with what was left open filled in.

    Raises:
        ConfigError: options that contradict each other, or a device that is not there.
    """
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}; at least 1 timed run is needed.")
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


def _points(arguments: argparse.Namespace) -> list[Point]:
    if arguments.points:
        return parse_points(arguments.points, arguments.ragged)
    return grid_points(
        arguments.prefix or PREFIXES, arguments.ratios, arguments.generations, arguments.response, arguments.ragged
    )


class StepRun:
    """One run over a list of points: what it costs is learnt on the way."""

    def __init__(self, arguments: argparse.Namespace, results: Results):
        self.arguments = arguments
        self.results = results
        self.start_seconds = time.monotonic()
        on_cpu = arguments.device == "cpu"
        self.estimator = Estimator(
            SIZES[arguments.model],
            arguments.checkpointing,
            ELEMENT_BYTES[arguments.dtype],
            first_rate=CPU_THREAD_RATE * arguments.threads if on_cpu else GPU_RATE,
        )
        self.runs = 1 + arguments.repeats + (1 if on_cpu and arguments.memory else 0)
        for record in results.data["points"]:
            point = Point(record["prefix"], record["generations"], record["response"], arguments.ragged)
            self._learn(point, record)
        self.contestants = self._available()

    def measure(self, points: Sequence[Point]) -> None:
        """Measure what fits; every point and contestant that is left out is written down."""
        todo = [point for point in points if self.results.find(point) is None]
        if done := len(points) - len(todo):
            print(f"{done} of {len(points)} points are in {self.results.path} already")
        for index, point in enumerate(todo):
            plan = self._plan(point)
            head = f"[{index + 1}/{len(todo)}] {point} (ratio {point.ratio:g})"
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
            where = f"{entry['prefix']},{entry['generations']},{entry['response']}"
            print(f"  {where:18} {entry['contestant']}: {entry['reason']}")

    def _available(self) -> list[str]:
        import torch

        from vlm_pg.bench.contestants import CONTESTANTS

        self.unavailable: dict[str, str] = {}
        for name in self.arguments.contestants:
            reason = CONTESTANTS[name].unavailable_because(torch.device(self.arguments.device))
            if reason:
                self.unavailable[name] = reason
        return [name for name in self.arguments.contestants if name not in self.unavailable]

    def _plan(self, point: Point) -> Plan:
        budget = self.arguments.budget_minutes
        total = None if budget is None else 60 * budget
        left = None if total is None else total - (time.monotonic() - self.start_seconds)
        plan = plan_point(point, self.contestants, self.estimator, self.runs, left, total, self._memory_limit())
        return Plan(plan.contestants, self.unavailable | plan.skipped, plan.seconds)

    def _memory_limit(self) -> float | None:
        if self.arguments.memory_gib is not None:
            return self.arguments.memory_gib * 2**30
        free = available_bytes() if self.arguments.device == "cpu" else None
        return None if free is None else 0.8 * free

    def _measure(self, point: Point, plan: Plan) -> None:
        spec = {
            "model": self.arguments.model,
            "dtype": self.arguments.dtype,
            "device": self.arguments.device,
            "checkpointing": self.arguments.checkpointing,
            "threads": self.arguments.threads,
            "repeats": self.arguments.repeats,
            "memory": self.arguments.memory,
            "prefix": point.prefix,
            "lengths": list(point.lengths),
            "contestants": plan.contestants,
        }
        before = time.monotonic()
        try:
            measured = run_worker(spec, max(LEAST_PATIENCE_SECONDS, PATIENCE * plan.seconds))
        except WorkerKilled as killed:
            for name in plan.contestants:
                self.results.add_skipped(point, name, str(killed))
            print(f"  no result: {killed}", flush=True)
            return
        wall_seconds = time.monotonic() - before
        shape, element_bytes = SIZES[self.arguments.model], ELEMENT_BYTES[self.arguments.dtype]
        record = summarise(point, measured, shape, self.arguments.checkpointing, element_bytes)
        for name, reason in measured["failed"].items():
            self.results.add_skipped(point, name, reason)
        self.results.add_point(record)
        in_steps = sum(self.runs * entry["median_seconds"] for entry in record["contestants"].values())
        self.estimator.start_seconds = max(1.0, wall_seconds - in_steps)
        self._learn(point, record)
        print("\n".join(point_lines(record)), flush=True)

    def _learn(self, point: Point, record: dict[str, Any]) -> None:
        for name, entry in record["contestants"].items():
            self.estimator.learn(name, point, statistics.median(entry["seconds"]), entry.get("peak_bytes"))


class WorkerKilled(Exception):
    """The measuring process was killed from outside or took far too long; other points can still be measured."""


def run_worker(spec: dict[str, Any], patience_seconds: float) -> dict[str, Any]:
    """Measure one point in a fresh process.

    Raises:
        WorkerKilled: killed by a signal, or not done within ``patience_seconds``.
        RuntimeError: it raised; the message ends with its traceback.
    """
    threads = str(spec["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        spec_path, result_path, log_path = (Path(folder, name) for name in ("spec.json", "result.json", "log"))
        spec_path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "vlm_pg.bench.worker", str(spec_path), str(result_path)]
        with log_path.open("w") as log:
            try:
                code = subprocess.run(command, env=environment, stderr=log, timeout=patience_seconds).returncode
            except subprocess.TimeoutExpired as error:
                raise WorkerKilled(f"not done after {patience_seconds / 60:.0f} min, stopped") from error
        if code < 0:
            raise WorkerKilled(f"killed by signal {-code} (9: mostly out of memory)")
        if code:
            raise RuntimeError(f"Measuring failed with exit code {code}:\n{log_path.read_text()[-4000:]}")
        return json.loads(result_path.read_text())

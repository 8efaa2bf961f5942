"""``vlm-pg bench rollout``: generating G responses per prompt."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.bench.budget import CostEstimator
from vlm_pg.bench.generation.grid import PREFIXES, RolloutPoint, parse_rollout_points, rollout_points
from vlm_pg.bench.generation.options import rollout_parser
from vlm_pg.bench.generation.report import generation_lines, summarise_generation
from vlm_pg.bench.generation.work import GENERATION_WORK, ONE_BY_ONE, expected_generation_bytes, measurement_cost
from vlm_pg.bench.results import Results
from vlm_pg.bench.runner import ELEMENT_BYTES, PointsRun, checked_options, first_rate
from vlm_pg.bench.shapes import SIZES, LanguageShape

MEASUREMENT = "rollout"
# What must be the same for points to stand in one file.
COMPARABLE = ("model", "dtype", "device", "repeats", "threads")


def main(argv: Sequence[str]) -> int:
    """Run from the command line; see ``vlm-pg bench rollout --help``."""
    arguments = checked_options(rollout_parser().parse_args(argv))
    points = _points(arguments)
    settings = {key: getattr(arguments, key) for key in COMPARABLE}
    command = shlex.join(["vlm-pg", "bench", MEASUREMENT, *argv])
    begin = Results.resume if arguments.resume else Results.start
    run = RolloutRun(arguments, begin(arguments.out, settings, command, MEASUREMENT))
    run.measure(points)
    run.finish()
    return 0


def _points(arguments: argparse.Namespace) -> list[RolloutPoint]:
    if arguments.points:
        return parse_rollout_points(arguments.points)
    return rollout_points(arguments.prefix or PREFIXES, arguments.generations, arguments.new_tokens, arguments.groups)


@dataclass
class GenerationEstimator(CostEstimator[RolloutPoint]):
    """One run is a generation of all tokens and one of a single token."""

    shape: LanguageShape
    element_bytes: int

    def _flops(self, name: str, point: RolloutPoint) -> float:
        return measurement_cost(self.shape, GENERATION_WORK[name](point))

    def _peak(self, name: str, point: RolloutPoint) -> float:
        return expected_generation_bytes(self.shape, GENERATION_WORK[name](point), self.element_bytes)


class RolloutRun(PointsRun[RolloutPoint]):
    """One run over points of generation."""

    worker = "vlm_pg.bench.generation.worker"

    def __init__(self, arguments: argparse.Namespace, results: Results):
        self.shape, self.element_bytes = SIZES[arguments.model], ELEMENT_BYTES[arguments.dtype]
        estimator = GenerationEstimator(self.shape, self.element_bytes, first_rate=first_rate(arguments))
        super().__init__(arguments, results, estimator)

    def _unavailable_because(self, contestant: str) -> str | None:
        import torch

        from vlm_pg.bench.generation.contestants import GENERATORS

        return GENERATORS[contestant].unavailable_because(torch.device(self.arguments.device))

    def _contestants_at(self, point: RolloutPoint) -> list[str]:
        # One group after the other is the same as together where there is one.
        return [name for name in self.contestants if name != ONE_BY_ONE or point.groups > 1]

    def _point_of(self, record: dict[str, Any]) -> RolloutPoint:
        return RolloutPoint(record["prefix"], record["generations"], record["new_tokens"], record["groups"])

    def _point_spec(self, point: RolloutPoint) -> dict[str, Any]:
        return point.identity

    def _summarise(self, point: RolloutPoint, measured: dict[str, Any]) -> dict[str, Any]:
        return summarise_generation(point, measured, self.shape, self.element_bytes)

    def _lines(self, record: dict[str, Any]) -> list[str]:
        return generation_lines(record)

    def _run_seconds(self, entry: dict[str, Any]) -> float:
        return float(entry["median_seconds"] + entry["first_token_seconds"])

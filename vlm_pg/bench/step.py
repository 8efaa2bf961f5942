"""``vlm-pg bench step``: one group's forward and backward."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from vlm_pg.bench.budget import Estimator
from vlm_pg.bench.grid import PREFIXES, Point, grid_points, parse_points
from vlm_pg.bench.options import step_parser
from vlm_pg.bench.report import point_lines, summarise
from vlm_pg.bench.results import Results
from vlm_pg.bench.runner import ELEMENT_BYTES, PointsRun, checked_options, first_rate
from vlm_pg.bench.shapes import SIZES

# What must be the same for points to stand in one file.
COMPARABLE = ("model", "dtype", "device", "checkpointing", "ragged", "repeats", "threads")


def main(argv: Sequence[str]) -> int:
    """Run from the command line; see ``vlm-pg bench step --help``."""
    arguments = checked_options(step_parser().parse_args(argv))
    points = _points(arguments)
    settings = {key: getattr(arguments, key) for key in COMPARABLE}
    command = shlex.join(["vlm-pg", "bench", "step", *argv])
    begin = Results.resume if arguments.resume else Results.start
    run = StepRun(arguments, begin(arguments.out, settings, command))
    run.measure(points)
    run.finish()
    return 0


def _points(arguments: argparse.Namespace) -> list[Point]:
    if arguments.points:
        return parse_points(arguments.points, arguments.ragged)
    return grid_points(
        arguments.prefix or PREFIXES, arguments.ratios, arguments.generations, arguments.response, arguments.ragged
    )


class StepRun(PointsRun[Point]):
    """One run over groups, forward and backward."""

    worker = "vlm_pg.bench.worker"

    def __init__(self, arguments: argparse.Namespace, results: Results):
        self.shape, self.element_bytes = SIZES[arguments.model], ELEMENT_BYTES[arguments.dtype]
        estimator = Estimator(self.shape, arguments.checkpointing, self.element_bytes, first_rate=first_rate(arguments))
        super().__init__(arguments, results, estimator)

    def _unavailable_because(self, contestant: str) -> str | None:
        import torch

        from vlm_pg.bench.contestants import CONTESTANTS

        return CONTESTANTS[contestant].unavailable_because(torch.device(self.arguments.device))

    def _point_of(self, record: dict[str, Any]) -> Point:
        return Point(record["prefix"], record["generations"], record["response"], self.arguments.ragged)

    def _point_spec(self, point: Point) -> dict[str, Any]:
        return {
            "checkpointing": self.arguments.checkpointing,
            "prefix": point.prefix,
            "lengths": list(point.lengths),
        }

    def _summarise(self, point: Point, measured: dict[str, Any]) -> dict[str, Any]:
        return summarise(point, measured, self.shape, self.arguments.checkpointing, self.element_bytes)

    def _lines(self, record: dict[str, Any]) -> list[str]:
        return point_lines(record)

    def _run_seconds(self, entry: dict[str, Any]) -> float:
        return float(entry["median_seconds"])

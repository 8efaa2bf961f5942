"""metrics.jsonl: one line of numbers per step."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vlm_pg.errors import VlmPgError
from vlm_pg.files import LineFile, keep_json_lines, write_json_atomic
from vlm_pg.metrics import RESERVED_KEYS, Chart, Metric
from vlm_pg.observe.run_folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawn:
    """How a metric is drawn: its unit, and its chart; None for one of its own."""

    unit: str
    chart: Chart | None


def read_drawn(path: Path) -> dict[str, Drawn]:
    """How the metrics of a run are drawn. Raises OSError or ValueError where the file does not say."""
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(path)
    return TypeAdapter(dict[str, Drawn]).validate_python(json.loads(path.read_bytes()))


class MetricsLog(LineFile):
    """Appends metrics of one run.

    A line is flat: ``{"step": 12, "phase": "train", "time": 1760000000.1, "reward": 0.61, "kl": null}``.

    Args:
        folder: the run's folder.
        resume_step: the step the run continues after; lines beyond it are moved to ``metrics.jsonl.abandoned``, so that
            no step appears twice. None for a new run.
    """

    def __init__(self, folder: RunFolder, resume_step: int | None = None):
        forget_later_steps(folder.metrics, resume_step)
        super().__init__(folder.metrics)
        self._curves = folder.curves
        self._drawn: dict[str, Drawn] = {}
        with suppress(OSError, ValueError, RecursionError):
            self._drawn = read_drawn(folder.curves)

    def write(self, step: int, values: Mapping[str, float | None], phase: str = "train") -> None:
        """Write one line and flush it. None is kept as null; NaN or infinity raises VlmPgError naming the key.

        What metrics among the keys say of how they are drawn goes into ``curves.json``.
        """
        numbers = {key: _checked(step, key, value) for key, value in values.items()}
        line = {"step": step, "phase": phase, "time": round(time.time(), 3), **numbers}
        drawn: dict[str, Drawn] = {key: Drawn(key.unit, key.chart) for key in values if isinstance(key, Metric)}
        if not drawn.items() <= self._drawn.items():
            self._drawn |= drawn
            write_json_atomic(self._curves, {key: asdict(how) for key, how in self._drawn.items()})
        self.append(line)


def forget_later_steps(path: Path, resume_step: int | None) -> None:
    """Move lines of ``path`` that lie after ``resume_step`` to ``<name>.abandoned``, damaged ones to ``.damaged``."""
    if resume_step is None:
        return
    _, damaged = keep_json_lines(path, lambda record: _step_of(record) <= resume_step)
    if damaged:
        logger.warning(
            "%s had %d line(s) that were not JSON (a killed run leaves one); moved to %s.damaged",
            path, damaged, path.name,
        )  # fmt: skip


def _step_of(record: Mapping[str, Any]) -> float:
    """The step of a line; a line without one belongs to no step and is kept."""
    step = record.get("step")
    if not isinstance(step, int | float) or isinstance(step, bool) or step != step:
        return -math.inf
    return step


def _checked(step: int, key: str, value: float | None) -> float | int | None:
    if key in RESERVED_KEYS:
        raise KeyError(f"metric '{key}' would hide the line's own '{key}'; call it something else")
    if value is None:
        return None
    number = value if isinstance(value, int) else float(value)
    if not math.isfinite(number):
        raise VlmPgError(
            f"metric '{key}' of step {step} is {number}. Metrics must be finite numbers, or null where there is no "
            "value. If training diverged, lower training.learning_rate or raise algorithm.kl_coef and resume from the "
            "last checkpoint."
        )
    return number

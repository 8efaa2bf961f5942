"""Reading a run's folder for the report: what is there, and a plain sentence about what is not.

A run may still be going or may have been killed, so every file may be absent and the last line of a JSONL file may
be half written.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from vlm_pg.errors import ConfigError
from vlm_pg.files import parse_json_line
from vlm_pg.metrics import RESERVED_KEYS
from vlm_pg.observe.logs import Drawn, read_drawn
from vlm_pg.observe.report.markup import number_or_none
from vlm_pg.observe.run_folder import RunFolder

# Beyond any run: a larger number stands in a damaged line.
MAX_STEP = 10**12


@dataclass
class Series:
    """One metric over the steps that have a value for it, in order of step."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    @property
    def last(self) -> float:
        """The latest value."""
        return self.values[-1]


@dataclass
class Metrics:
    """All of metrics.jsonl by phase and key: ``metrics.of("train")["reward"]``."""

    phases: dict[str, dict[str, Series]] = field(default_factory=dict)
    num_lines: int = 0
    last_step: int = 0
    first_seconds: float | None = None
    last_seconds: float | None = None

    def of(self, phase: str) -> dict[str, Series]:
        """The series of one phase, by key; empty if the phase has none."""
        return self.phases.get(phase, {})


@dataclass
class RunData:
    """What the report is made from.

    ``missing``: per file name, why it has nothing to show. ``damaged_lines``: how many of its lines are no records.
    ``odd``: how many steps and values in them no run can have.
    """

    folder: RunFolder
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    metrics: Metrics
    bad_samples: list[dict[str, Any]]
    bad_counts: dict[str, int]
    eval_files: dict[str, int]
    missing: dict[str, str]
    damaged_lines: dict[str, int]
    odd: dict[str, int] = field(default_factory=dict)
    drawn: dict[str, Drawn] = field(default_factory=dict)


def read_run(path: Path) -> RunData:
    """Read a run's folder. Raises ConfigError when ``path`` is not a folder or holds none of a run's files."""
    folder = RunFolder(Path(path))
    known = (folder.config, folder.metrics, folder.rollouts, folder.summary)
    if not folder.path.is_dir() or not any(file.exists() for file in known):
        raise ConfigError(
            f"'{path}' is not a run's folder. One holds config.yaml, metrics.jsonl, rollouts.jsonl or summary.json. "
            "Give the folder that a training run wrote, e.g. runs/embedded."
        )
    run = RunData(folder, {}, "", {}, Metrics(), [], {}, {}, {}, {})
    _read_config(run)
    _read_summary(run)
    _read_metrics(run)
    _read_drawn(run)
    _read_bad_samples(run)
    for file in sorted(folder.path.glob("eval_*.jsonl")):
        with suppress(OSError), file.open("rb") as lines:
            run.eval_files[file.name] = sum(1 for _ in lines)
    if not folder.rollouts.exists():
        run.missing["rollouts.jsonl"] = "rollouts.jsonl is not there: no rollouts have been logged."
    return run


def _read_config(run: RunData) -> None:
    path = run.folder.config
    if not path.exists():
        run.missing[path.name] = "config.yaml is not there: the run's settings are unknown."
        return
    try:
        run.config_text = path.read_text("utf-8", errors="replace")
        config = yaml.safe_load(run.config_text)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        run.missing[path.name] = f"config.yaml cannot be read: {error}"
        return
    run.config = config if isinstance(config, dict) else {}


def _read_summary(run: RunData) -> None:
    path = run.folder.summary
    if not path.exists():
        run.missing[path.name] = "summary.json is not there yet: it is written during the run and completed at its end."
        return
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        run.missing[path.name] = f"summary.json cannot be read: {error}"
        return
    run.summary = summary if isinstance(summary, dict) else {}


def _read_metrics(run: RunData) -> None:
    path = run.folder.metrics
    if not path.exists():
        run.missing[path.name] = "metrics.jsonl is not there: no step has been logged."
        return
    try:
        for record in json_records(path, run.damaged_lines):
            odd = _add_line(run.metrics, record)
            if odd:
                run.odd[path.name] = run.odd.get(path.name, 0) + odd
    except OSError as error:
        run.missing[path.name] = f"metrics.jsonl cannot be read: {error}"
        return
    for series_of_phase in run.metrics.phases.values():
        for series in series_of_phase.values():
            _sort_steps(series)
    if not run.metrics.num_lines:
        run.missing[path.name] = "metrics.jsonl is empty: no step has been logged."


def _read_drawn(run: RunData) -> None:
    path = run.folder.curves
    try:
        run.drawn = read_drawn(path)
    except (OSError, ValueError, RecursionError):
        run.missing[path.name] = "curves.json is not there or cannot be read: every metric has a chart of its own."


def json_records(path: Path, damaged_lines: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a JSONL file; other lines are counted under the file's name, not raised.

    A last line without its newline is being written at this moment and is not counted.
    """
    with path.open("rb") as file:
        for line in file:
            record = parse_json_line(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                damaged_lines[path.name] = damaged_lines.get(path.name, 0) + 1


def is_step(value: object) -> TypeGuard[int]:
    """Whether a run can have such a step."""
    return type(value) is int and 0 <= value <= MAX_STEP


def _add_line(metrics: Metrics, record: dict[str, Any]) -> int:
    """Add what can be drawn; how many values cannot, a step that no run has counting as one."""
    step = record.get("step")
    if not is_step(step):
        return int("step" in record)
    odd = 0
    phase = metrics.phases.setdefault(str(record.get("phase", "train")), {})
    seconds = number_or_none(record.get("time"))
    if seconds is not None:
        metrics.first_seconds = metrics.first_seconds if metrics.first_seconds is not None else seconds
        metrics.last_seconds = seconds
    metrics.num_lines += 1
    metrics.last_step = max(metrics.last_step, step)
    for key, value in record.items():
        if key in RESERVED_KEYS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        number = number_or_none(value)
        if number is None:
            odd += 1
            continue
        series = phase.setdefault(key, Series())
        series.steps.append(step)
        series.values.append(number)
    return odd


def _sort_steps(series: Series) -> None:
    """Put steps in order; a step logged twice keeps its later value."""
    steps = series.steps
    if all(steps[index] < steps[index + 1] for index in range(len(steps) - 1)):
        return
    latest = dict(zip(series.steps, series.values, strict=True))
    series.steps = array("q", sorted(latest))
    series.values = array("d", (latest[step] for step in series.steps))


def _read_bad_samples(run: RunData) -> None:
    path = run.folder.bad_samples
    counts: Counter[str] = Counter()
    if path.is_file():
        for record in json_records(path, run.damaged_lines):
            counts[str(record.get("reason", "unknown"))] += 1
            if counts[str(record.get("reason", "unknown"))] == 1:
                run.bad_samples.append(record)
    stated = run.summary.get("bad_samples")
    if isinstance(stated, dict):
        for reason, count in stated.items():
            if isinstance(count, int):
                counts[str(reason)] = max(count, counts[str(reason)])
    run.bad_counts = {reason: count for reason, count in counts.most_common() if count}

"""Reading a run's folder for the report: its data, and a sentence for every file that has none.

A run may still be going or may have been killed, so every file may be absent and the last line of a JSONL file may
be half written.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from vlm_pg.errors import ConfigError
from vlm_pg.files import parse_json_line
from vlm_pg.metrics import RESERVED_KEYS
from vlm_pg.observe.logs import Drawn, read_drawn
from vlm_pg.observe.report.markup import dict_at, number_or_none
from vlm_pg.observe.run_folder import RunFolder

# Beyond any run: a larger number is in a damaged line.
MAX_STEP = 10**12


@dataclass
class Series:
    """One metric over the steps that have a value for it, in order of step."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def sort(self) -> None:
        """Put steps in order; a step logged twice keeps its later value."""
        if any(self.steps[index] >= self.steps[index + 1] for index in range(len(self.steps) - 1)):
            latest = dict(zip(self.steps, self.values, strict=True))
            self.steps = array("q", sorted(latest))
            self.values = array("d", (latest[step] for step in self.steps))


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

    def add(self, record: dict[str, Any]) -> bool:
        """Add the numbers of a line that can be drawn; False where the line has no step."""
        step = record.get("step")
        if not is_step(step):
            return False
        phase = self.phases.setdefault(str(record.get("phase", "train")), {})
        seconds = number_or_none(record.get("time"))
        if seconds is not None:
            self.first_seconds = seconds if self.first_seconds is None else self.first_seconds
            self.last_seconds = seconds
        self.num_lines += 1
        self.last_step = max(self.last_step, step)
        for key, value in record.items():
            number = number_or_none(value)
            if number is not None and key not in RESERVED_KEYS:
                series = phase.setdefault(key, Series())
                series.steps.append(step)
                series.values.append(number)
        return True


@dataclass
class RunData:
    """All that the report shows.

    ``missing``: per file name, why it has nothing to show. ``damaged_lines``: per file, lines that are no records.
    ``bad_samples``: one per reason.
    """

    folder: RunFolder
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    bad_samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    bad_counts: dict[str, int] = field(default_factory=dict)
    eval_files: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    damaged_lines: Counter[str] = field(default_factory=Counter)
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
    run = RunData(folder)
    with _readable(run, folder.config, "is not there: the run's settings are unknown."):
        run.config_text = folder.config.read_text("utf-8", errors="replace")
        run.config = dict_at(yaml.safe_load(run.config_text))
    with _readable(run, folder.summary, "is not there yet: it is written during the run and completed at its end."):
        run.summary = dict_at(json.loads(folder.summary.read_bytes()))
    with _readable(run, folder.metrics, "is not there: no step has been logged."):
        for record in json_records(folder.metrics, run.damaged_lines):
            if not run.metrics.add(record):
                run.damaged_lines[folder.metrics.name] += 1
        for series in (series for of_phase in run.metrics.phases.values() for series in of_phase.values()):
            series.sort()
        if not run.metrics.num_lines:
            run.missing[folder.metrics.name] = "metrics.jsonl is empty: no step has been logged."
    try:
        run.drawn = read_drawn(folder.curves)
    except (OSError, ValueError, RecursionError):
        run.missing["curves.json"] = "curves.json is not there or cannot be read: every metric has a chart of its own."
    counts: Counter[str] = Counter()
    if folder.bad_samples.is_file():
        for record in json_records(folder.bad_samples, run.damaged_lines):
            reason = str(record.get("reason", "unknown"))
            counts[reason] += 1
            run.bad_samples.setdefault(reason, record)
    for reason, count in dict_at(run.summary, "bad_samples").items():
        if isinstance(count, int):
            counts[str(reason)] = max(count, counts[str(reason)])
    run.bad_counts = {reason: count for reason, count in counts.most_common() if count}
    for file in sorted(folder.path.glob("eval_*.jsonl")):
        with suppress(OSError), file.open("rb") as lines:
            run.eval_files[file.name] = sum(1 for _ in lines)
    if not folder.rollouts.exists():
        run.missing["rollouts.jsonl"] = "rollouts.jsonl is not there: no rollouts have been logged."
    return run


@contextmanager
def _readable(run: RunData, path: Path, absent: str) -> Iterator[None]:
    """Record why a file has nothing to show: ``absent``, or the error of reading it."""
    try:
        yield
    except FileNotFoundError:
        run.missing[path.name] = f"{path.name} {absent}"
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        run.missing[path.name] = f"{path.name} cannot be read: {error}"


def json_records(path: Path, damaged_lines: Counter[str]) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a JSONL file; other lines are counted under the file's name, not raised.

    A last line without its newline is being written at this moment and is not counted.
    """
    with path.open("rb") as file:
        for line in file:
            record = parse_json_line(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                damaged_lines[path.name] += 1


def is_step(value: object) -> TypeGuard[int]:
    """Whether a run can have such a step."""
    return type(value) is int and 0 <= value <= MAX_STEP

"""Stages one after another within a time limit, each in processes of its own; results are written after every stage."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from scripts.bench.gpu_check.machine import REPOSITORY, missing, missing_words
from scripts.bench.gpu_check.reading import LOG_LINES, last_words, log_lines
from scripts.bench.gpu_check.stages import Stage, as_begun, log_of
from vlm_pg.errors import ConfigError
from vlm_pg.files import write_json_atomic
from vlm_pg.processes import how_it_ended, kill_group

FORMAT = 1
RESULT, PAGE = "result.json", "report.html"

Status = Literal["ok", "failed", "time was up", "left out"]


@dataclass
class Outcome:
    """What became of a stage.

    ``code``: of the last command, None where it was ended or none began. ``problem``: why it is not ok, in words.
    ``remarks``: what is to be known of a stage that is. ``end_of_log``: its last lines, unless it is ok.
    """

    name: str
    title: str
    status: Status
    code: int | None = None
    seconds: float = 0.0
    limit_seconds: float = 0.0
    problem: str = ""
    remarks: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    log: str | None = None
    end_of_log: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class Result:
    """What is known so far. ``head``: of the run as a whole."""

    def __init__(self, folder: Path, head: dict[str, Any], outcomes: list[Outcome]):
        self.folder, self.head, self.outcomes = folder, head, outcomes

    @classmethod
    def open(cls, folder: Path, head: dict[str, Any], resume: bool) -> Result:
        """An empty result, or with ``resume`` what became of the stages that have run.

        Raises:
            ConfigError: the folder holds something and is not to be gone on with, or its result cannot be read.
        """
        path = folder / RESULT
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty. Add --resume to run what it lacks, or give another --out.")
        folder.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, **head}
        if not path.is_file():
            return cls(folder, head, [])
        try:
            earlier = json.loads(path.read_bytes())
            if earlier["format"] != FORMAT:
                raise ConfigError(f"{path} has format {earlier['format']!r}, not {FORMAT}. Give another --out.")
            outcomes = [Outcome(**entry) for entry in earlier["stages"]]
            commands = list(earlier["commands"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} cannot be read ({error!r}). Give another folder with --out.") from error
        head["commands"] = [*commands, *head["commands"]]
        return cls(folder, head, outcomes)

    def is_ok(self, name: str) -> bool:
        """Whether the stage of that name has gone well already."""
        return any(outcome.name == name and outcome.status == "ok" for outcome in self.outcomes)

    def named(self, name: str) -> Outcome:
        """What became of a stage that has run."""
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    def add(self, outcome: Outcome) -> None:
        """In the place of an earlier one of that name; written at once."""
        self.outcomes = [other for other in self.outcomes if other.name != outcome.name] + [outcome]
        self.save()

    def as_json(self) -> dict[str, Any]:
        return {**self.head, "stages": [asdict(outcome) for outcome in self.outcomes]}

    def save(self) -> None:
        """Numbers that are not finite are written as text: JSON has none."""
        write_json_atomic(self.folder / RESULT, _finite(self.as_json()))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not (-float("inf") < value < float("inf")):
        return str(value)
    return value


# After the first signal, so that what holds a GPU or a file may let go of it.
GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``code``: as the system reports it, -N for signal N; None where its time was up."""

    code: int | None
    seconds: float


def run_limited(
    command: Sequence[str], log: Path, limit_seconds: float, environment: Mapping[str, str], folder: Path
) -> Ended:
    """Run ``command`` in ``folder``, its output appended to ``log``.

    Past ``limit_seconds`` it is ended with all its descendants, also those that lead a session of their own. So it is
    when this process is interrupted meanwhile.

    Raises:
        OSError: the program cannot be started.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(environment),
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(max(0.0, limit_seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return Ended(code, time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The command has ended and what it left in its group goes, too; or it is made to end."""
    if process.poll() is None:
        others = descendants(process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    kill_group(process.pid)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Children of ``pid``, their children and so on, where the system tells (/proc)."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state parent ...", and a name may hold brackets and spaces.
            parent = int(status.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (below := children.get(todo.pop(), []))
        found += below
    return found


# Kept for the page, and for ending what is stopped.
RESERVE_SECONDS = 8.0
# A stage that would get less than this is not begun.
LEAST_SECONDS = 5.0


class Run:
    """One run of a list of stages.

    Args:
        device: cpu or cuda. On a CPU stages that need a GPU are left out.
        seconds: for all stages.
        python_path: folders of packages, before all others.
    """

    def __init__(self, result: Result, device: str, seconds: float, python_path: Sequence[str]):
        self.result, self.device = result, device
        self.end = time.monotonic() + seconds - RESERVE_SECONDS
        self.environment = _environment(device, python_path)
        self._begun = 0

    def go(self, stages: Sequence[Stage]) -> None:
        """Run those that have not gone well already."""
        for index, stage in enumerate(stages):
            if self.result.is_ok(stage.name):
                print(f"{stage.name}: was done before", flush=True)
                if stage.reads_others:
                    self.result.add(_read(stage, self.result.named(stage.name)))
                continue
            outcome = self._outcome(stage, stages[index:])
            self.result.add(outcome)
            print(f"{stage.name}: {line_of(outcome)}", flush=True)

    def _outcome(self, stage: Stage, todo: Sequence[Stage]) -> Outcome:
        words = self._left_out_because(stage)
        left = self.end - time.monotonic()
        if not words and self._begun and left < max(LEAST_SECONDS, stage.least_seconds):
            words = f"{max(0.0, left):.0f} s were left; run again with --resume, or give more --minutes"
        if words:
            return Outcome(stage.name, stage.title, "left out", problem=words)
        self._begun += 1
        if stage.least_seconds:
            limit = max(left, LEAST_SECONDS)
        else:
            shares = sum(other.share for other in todo if not self._left_out_because(other))
            limit = max(left * stage.share / shares, LEAST_SECONDS)
        print(f"{stage.name}: {stage.title} (at most {limit:.0f} s)", flush=True)
        return self._run(stage, limit)

    def _left_out_because(self, stage: Stage) -> str:
        if stage.needs_gpu and self.device == "cpu":
            return "no GPU here"
        lacking = missing(stage.needs)
        if lacking:
            return missing_words(lacking)
        return ""

    def _run(self, stage: Stage, limit: float) -> Outcome:
        log = log_of(self.result.folder, stage.name)
        for path in (log, *stage.writes):
            path.unlink(missing_ok=True)
        outcome = Outcome(stage.name, stage.title, "ok", limit_seconds=limit, log=log.name)
        for command in map(as_begun, stage.commands):
            outcome.commands.append(shlex.join(command))
            with log.open("a") as file:
                file.write(f"$ {outcome.commands[-1]}\n")
            try:
                ended = run_limited(command, log, limit - outcome.seconds, self.environment, REPOSITORY)
            except OSError as error:
                outcome.status, outcome.problem = "failed", f"{command[0]} cannot be started: {error}"
                break
            outcome.code, outcome.seconds = ended.code, outcome.seconds + ended.seconds
            if ended.code != 0:
                late = ended.code is None
                outcome.status = "time was up" if late else "failed"
                why = "" if late else f"{how_it_ended(ended.code or 0)}: {last_words(log)[:500]}"
                outcome.problem = why or f"after {outcome.seconds:.0f} s it was ended"
                break
        _read(stage, outcome)
        if outcome.status != "ok":
            outcome.end_of_log = log_lines(log)[-LOG_LINES:]
        return outcome


def _read(stage: Stage, outcome: Outcome) -> Outcome:
    """The outcome with what the stage has found. Commands that ended well may have found something bad."""
    try:
        reading = stage.read()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        outcome.remarks.append(f"what it wrote could not be read: {error!r}")
        if outcome.status == "ok":
            outcome.status, outcome.problem = "failed", "what it wrote could not be read"
        return outcome
    outcome.figures, outcome.remarks = reading.figures, reading.remarks
    if reading.problem and outcome.status == "ok":
        outcome.status, outcome.problem = "failed", reading.problem
    elif reading.problem and reading.figures:
        outcome.problem = f"{outcome.problem}; {reading.problem}"
    return outcome


def line_of(outcome: Outcome) -> str:
    """An outcome in a line."""
    status: Status = outcome.status
    seconds = f" in {outcome.seconds:.0f} s" if outcome.commands else ""
    return f"{status}{seconds}" + (f": {outcome.problem}" if outcome.problem else "")


def _environment(device: str, python_path: Sequence[str]) -> Mapping[str, str]:
    found = dict(os.environ)
    before = [found["PYTHONPATH"]] if found.get("PYTHONPATH") else []
    found["PYTHONPATH"] = os.pathsep.join([*python_path, str(REPOSITORY), *before])
    found["PYTHONUNBUFFERED"] = "1"
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
        # Threads of such small work wait for each other longer than they compute.
        found.setdefault("OMP_NUM_THREADS", "1")
    return found

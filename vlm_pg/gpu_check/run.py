"""The stages one after another, within the time there is; what each found is written before the next one begins."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlm_pg.gpu_check.machine import REPOSITORY
from vlm_pg.gpu_check.packages import missing, missing_words
from vlm_pg.gpu_check.process import run_limited
from vlm_pg.gpu_check.reading import LOG_LINES, last_words, log_lines
from vlm_pg.gpu_check.result import Outcome, Result, Status
from vlm_pg.gpu_check.stages import Stage, as_begun, log_of
from vlm_pg.processes import how_it_ended

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
                outcome.problem = f"after {outcome.seconds:.0f} s it was ended" if late else _why(ended.code or 0, log)
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


def _why(code: int, log: Path) -> str:
    return f"{how_it_ended(code)}: {last_words(log)[:500]}"


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

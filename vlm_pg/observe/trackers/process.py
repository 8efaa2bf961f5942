"""The trainer's side of a tracker's process: it is told of steps and is never waited for while the run goes on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlm_pg.files import parse_json_line
from vlm_pg.processes import has_ended, how_it_ended, kill_group, start_interpreter

# Steps wait for so long before the tracker is said to hang.
STALL_SECONDS = 600.0
POLL_SECONDS = 0.05
# The end of a run is not worth a word if the tracker is done at once.
QUIET_SECONDS = 2.0


class TrackerProcess:
    """A tracker that follows the run's files in a process of its own.

    Args:
        name: of the tracker.
        arguments: for the process, see ``worker.main``.
        log: file for what the process prints.
        info, warn: told what people should know.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        log: Path,
        info: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
    ):
        self._name, self._log, self._info, self._warn = name, log, info, warn
        self._told, self._handed_over, self._progress_seconds = 0, 0, time.monotonic()
        self._said_stalled = self._said_ended = self._never_began = False
        self._missing: list[int] | None = None
        self._rest = b""
        with log.open("ab") as file:
            self._process = start_interpreter(
                "vlm_pg.observe.trackers.worker:main",
                [arguments],
                file,
                {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        for pipe in (self._commands, self._answers):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Of the process, which leads a process group."""
        return self._process.pid

    def step_done(self, step: int) -> None:
        """Both files are complete up to this step. Returns at once."""
        self._told = step
        self._send(f"step {step}")
        self._listen()
        self._say_if_stalled()
        self._say_if_ended()

    def finish(self, failed: bool) -> None:
        """Let the tracker send what is left. Returns at once; ``wait`` waits."""
        self._send("finish failed" if failed else "finish")

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, for at most so many seconds; then it is killed."""
        begun, said = time.monotonic(), False
        while (running := not self._has_ended()) and time.monotonic() - begun < seconds:
            self._listen()
            if not said and time.monotonic() - begun > QUIET_SECONDS:
                said = True
                self._info(f"{self._name}: sending what is left (observe.tracker_seconds limits it)")
            time.sleep(POLL_SECONDS)
        if running:
            kill_group(self._process.pid)
            self._process.wait()
        self._listen()
        for pipe in (self._commands, self._answers):
            pipe.close()
        self._say_what_is_missing(killed=running)

    def _send(self, line: str) -> None:
        with suppress(OSError):  # it has ended, or has long stopped reading: both are said elsewhere
            self._commands.write(line.encode() + b"\n")

    def _listen(self) -> None:
        while data := self._read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                # What a package prints while it is imported stands between the answers.
                self._take(parse_json_line(line) or {})

    def _read(self) -> bytes | None:
        try:
            return os.read(self._answers.fileno(), 65536)
        except BlockingIOError:
            return None

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "warning" in answer:
            self._warn(f"{answer['warning']} ({self._log} has more.)")
        if "where" in answer:
            self._info(f"{self._name}: {answer['where']}")
        if "step" in answer:
            self._handed_over = max(self._handed_over, answer["step"])
            self._progress_seconds = time.monotonic()
        if "missing" in answer:
            self._missing = answer["missing"]
        if "never_began" in answer:
            self._never_began = True

    def _say_if_stalled(self) -> None:
        waits = self._told > self._handed_over
        if not waits:
            self._progress_seconds = time.monotonic()
        seconds = time.monotonic() - self._progress_seconds
        if waits and not self._said_stalled and seconds > STALL_SECONDS:
            self._said_stalled = True
            self._warn(
                f"observe.trackers: {self._name} has taken nothing for {seconds:.0f} s and is at step "
                f"{self._handed_over}. The run goes on; metrics.jsonl has everything. ({self._log} has more.)"
            )

    def _say_if_ended(self) -> None:
        if self._said_ended or not self._has_ended():
            return
        self._said_ended = True
        how = how_it_ended(self._process.returncode)
        self._warn(
            f"observe.trackers: {self._name}'s process has ended ({how}) at step {self._handed_over}. "
            f"The run goes on; metrics.jsonl has everything. ({self._log} has more.)"
        )

    def _has_ended(self) -> bool:
        """Whether the process has ended; what it has started and left behind ends with it."""
        if self._process.returncode is None:
            if not has_ended(self.pid):
                return False
            kill_group(self.pid)
            self._process.wait()
        return True

    def _say_what_is_missing(self, killed: bool) -> None:
        about = f"observe.trackers: {self._name}"
        if killed:
            self._warn(
                f"{about} was still sending and was ended (the end of a run waits observe.tracker_seconds). "
                f"{self._how_far()}"
            )
        elif self._never_began:
            self._warn(f"{about} could not begin while the run lasted. metrics.jsonl has everything.")
        elif self._missing is None:
            self._say_if_ended()
        else:
            self._say_what_was_passed_over(about, self._missing)

    def _say_what_was_passed_over(self, about: str, missing: list[int]) -> None:
        if missing:
            first, last = missing[0], missing[-1]
            self._warn(
                f"{about} did not take {len(missing)} of the steps {first} to {last}, or not in full. "
                f"metrics.jsonl has them. ({self._log} has more.)"
            )
        if self._handed_over < self._told:
            self._warn(f"{about} has not everything. {self._how_far()} ({self._log} has more.)")

    def _how_far(self) -> str:
        return (
            f"It was given the steps up to {self._handed_over} of {self._told}; metrics.jsonl has them all, and a "
            "resumed run sends the others."
        )

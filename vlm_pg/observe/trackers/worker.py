"""The process of one tracker: follows the run's files and feeds the tracker, and may be killed at any moment.

It is a fresh interpreter that leads a process group of its own and ends when the trainer does. A tracker may hang or
crash in it, take over its signals and its output, or fork, and the trainer goes on. What it prints goes into
``trackers/<name>.log``.

The trainer writes lines to it: ``step 12`` (both files are complete up to there) and ``finish`` or ``finish failed``.
It answers with JSON objects: ``where``, ``warning``, ``step`` (all up to it are behind), ``missing`` (the steps that
were given up), ``never_began``.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.trackers.delivery import Delivery
from vlm_pg.observe.trackers.flat import flat_config
from vlm_pg.observe.trackers.sink import Sink, TrackedRun
from vlm_pg.processes import end_with_parent, outlive_signals, resolve

# A tracker that is away for a minute misses nothing; one that refuses a step holds the others up for no longer.
STEP_PAUSES = (2.0, 10.0, 45.0)
BEGIN_PAUSES = (5.0, 30.0, 60.0)


def main(arguments: Mapping[str, Any]) -> None:
    """Serve until the trainer says ``finish`` or is gone.

    Args:
        arguments: ``name``, ``sink`` ("module:Class"), ``folder``, ``project``, ``run_name``, ``resume_step``,
            ``rollouts_every``, ``pid`` (of the trainer), ``state`` (file).
    """
    outlive_signals()
    commands, answers = Commands(_keep(0)), Answers(_keep(1))
    parent = Connection(os.dup(commands.descriptor), writable=False)
    threading.Thread(target=end_with_parent, args=(parent, arguments["pid"]), daemon=True).start()
    folder = RunFolder(Path(arguments["folder"]))
    sink: Sink = resolve(arguments["sink"])()
    config = flat_config(yaml.safe_load(folder.config.read_bytes())) if folder.config.is_file() else {}
    run = TrackedRun(
        folder,
        arguments["project"],
        arguments["run_name"],
        config,
        resume_step=arguments["resume_step"],
        pid=arguments["pid"],
    )
    delivery = Delivery(
        arguments["name"],
        sink,
        run,
        arguments["rollouts_every"],
        warn=lambda line: answers.send(warning=line),
        state=Path(arguments["state"]),
        pauses=STEP_PAUSES,
        wait=commands.wait,
        trace=traceback.print_exception,
        handed_over=lambda step: answers.send(step=step),
    )
    _serve(delivery, commands, answers)


def _serve(delivery: Delivery, commands: Commands, answers: Answers) -> None:
    answers.send(step=delivery.step)
    pauses = iter(BEGIN_PAUSES)
    while (where := delivery.begin()) is None:
        if not commands.wait(next(pauses, BEGIN_PAUSES[-1])):
            answers.send(never_began=True)
            return
    answers.send(where=where)
    while True:
        finished, up_to = commands.finished, commands.step
        if delivery.deliver(up_to):
            answers.send(step=up_to)
        if finished:
            break
        commands.wait_for_more(up_to)
    delivery.finish(commands.failed)
    answers.send(missing=delivery.missing)


class Commands:
    """What the trainer has said so far."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.step, self.finished, self.failed = 0, False, False
        self._rest = b""

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until the run is finished; False if it is."""
        end = time.monotonic() + seconds
        while not self.finished and (left := end - time.monotonic()) > 0:
            self._read(left)
        return not self.finished

    def wait_for_more(self, step: int) -> None:
        """Wait until a step beyond this one is complete, or the run is finished."""
        while not self.finished and self.step <= step:
            self._read(None)

    def _read(self, seconds: float | None) -> None:
        if not select.select([self.descriptor], [], [], seconds)[0]:
            return
        data = os.read(self.descriptor, 4096)
        if not data:  # the trainer is gone, and so is this process in a moment
            self.finished = self.failed = True
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "step":
                self.step = max(self.step, int(value))
            else:
                self.finished, self.failed = True, value == "failed"


class Answers:
    """JSON objects for the trainer, one a line."""

    def __init__(self, descriptor: int):
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def send(self, **message: Any) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")


def _keep(descriptor: int) -> int:
    """Standard input or output for ourselves; the tracker finds nothing to read there, and writes into its log."""
    ours = os.dup(descriptor)
    theirs = os.open(os.devnull, os.O_RDONLY) if descriptor == 0 else os.dup(2)
    os.dup2(theirs, descriptor)
    os.close(theirs)
    return ours

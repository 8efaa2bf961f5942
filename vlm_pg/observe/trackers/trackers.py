"""All trackers of a run: the ones in this process and the ones in their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import yaml

from vlm_pg.errors import printable
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.settings import ObserveSettings
from vlm_pg.observe.trackers.delivery import Delivery
from vlm_pg.observe.trackers.flat import flat_config
from vlm_pg.observe.trackers.kinds import KINDS
from vlm_pg.observe.trackers.process import TrackerProcess
from vlm_pg.observe.trackers.sink import TrackedRun
from vlm_pg.observe.trackers.state import TrackerState
from vlm_pg.processes import resolve


class Trackers:
    """Sends a run's steps to its trackers; usable as a context manager, on the rank that writes the run's folder.

    They read what metrics.jsonl and rollouts.jsonl hold, so both must be open (and shortened, where a run is resumed)
    before. Whatever a tracker does, the run goes on.

    Args:
        settings: which trackers.
        folder: the run's.
        name: of the run.
        resume_step: the step the run continues after; None for a new run.
        info, warn: told what people should know.
    """

    def __init__(
        self,
        settings: ObserveSettings,
        folder: RunFolder,
        name: str,
        resume_step: int | None = None,
        info: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
    ):
        self._settings, self._folder, self._name, self._resume_step = settings, folder, name, resume_step
        self._info, self._warn = info, warn
        self._here: list[Delivery] = []
        self._processes: list[TrackerProcess] = []
        for tracker in settings.trackers:
            if KINDS[tracker].is_service:
                self._begin_apart(tracker)
            else:
                self._begin_here(tracker)

    def step_done(self, step: int) -> None:
        """Everything of this step is in the run's files."""
        for delivery in self._here:
            delivery.deliver(step)
        for process in self._processes:
            process.step_done(step)

    def close(self, failed: bool = False, seconds: float | None = None) -> None:
        """End the trackers' runs; those still sending are waited for, ``observe.tracker_seconds`` in all by default."""
        for delivery in self._here:
            delivery.finish(failed)
        for process in self._processes:
            process.finish(failed)
        end = time.monotonic() + (self._settings.tracker_seconds if seconds is None else seconds)
        for process in self._processes:
            process.wait(max(0.0, end - time.monotonic()))
        self._here, self._processes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who interrupts a run that was asked to stop wants it to end at once.
        self.close(failed=kind is not None, seconds=0.0 if kind is KeyboardInterrupt else None)

    def _begin_here(self, tracker: str) -> None:
        folder = self._folder
        config = flat_config(yaml.safe_load(folder.config.read_bytes())) if folder.config.is_file() else {}
        run = TrackedRun(folder, self._settings.project, self._name, config, None, self._resume_step, os.getpid())
        delivery = Delivery(
            tracker,
            resolve(KINDS[tracker].sink)(),
            run,
            self._settings.track_rollouts_every,
            self._warn,
            after_step=self._resume_step or 0,
        )
        if delivery.begin() is not None:
            self._here.append(delivery)

    def _begin_apart(self, tracker: str) -> None:
        try:
            self._processes.append(self._start_process(tracker))
        except OSError as error:
            said = printable(f"{type(error).__name__}: {error}", 300)
            self._warn(
                f"observe.trackers: {tracker}'s process could not be started ({said}). The run goes on; metrics.jsonl "
                "has everything."
            )

    def _start_process(self, tracker: str) -> TrackerProcess:
        home = self._folder.trackers
        home.mkdir(exist_ok=True)
        state = home / f"{tracker}.json"
        before, resumed = TrackerState.read(state).step, self._resume_step
        if resumed is not None and before > resumed:
            self._info(
                f"{tracker} has the steps up to {before} already: those from {resumed + 1} on are not sent again"
            )
        arguments = {
            "name": tracker,
            "sink": KINDS[tracker].sink,
            "folder": str(self._folder.path),
            "project": self._settings.project,
            "run_name": self._name,
            "resume_step": resumed,
            "rollouts_every": self._settings.track_rollouts_every,
            "pid": os.getpid(),
            "state": str(state),
        }
        process = TrackerProcess(tracker, arguments, home / f"{tracker}.log", self._info, self._warn)
        if resumed:  # an earlier start may have ended before it had sent everything
            process.step_done(resumed)
        return process

"""Handing a run's steps to a sink, whatever the tracker raises: tried again, then passed over and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vlm_pg.errors import printable
from vlm_pg.observe.trackers.follow import Follower, Logged
from vlm_pg.observe.trackers.sink import Begun, Sink, TrackedRun
from vlm_pg.observe.trackers.state import TrackerState

ERROR_CHARACTERS = 300


class Delivery:
    """One tracker's supply.

    A step is noted as handed over before it is: a process that is killed in between leaves a gap in the tracker and
    never a step twice.

    Args:
        name: of the tracker.
        sink: what feeds it.
        run: what it is told when it begins.
        rollouts_every: as ``Follower`` takes it.
        warn: told of the first failure, and only of that.
        state: file of what is kept between two starts. None: whoever opened the sink knows where it goes on.
        after_step: without a file, the step after which it goes on.
        pauses: seconds to wait before each further try of a step.
        wait: waits so many seconds; False if there is no time for that any more.
        trace: given every error.
        handed_over: told of every step that is behind, whatever became of it.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        run: TrackedRun,
        rollouts_every: int,
        warn: Callable[[str], None],
        state: Path | None = None,
        after_step: int = 0,
        pauses: Sequence[float] = (),
        wait: Callable[[float], bool] = lambda seconds: False,
        trace: Callable[[Exception], object] = lambda error: None,
        handed_over: Callable[[int], object] = lambda step: None,
    ):
        self._name, self._sink, self._run, self._warn = name, sink, run, warn
        self._path, self._pauses, self._wait, self._trace = state, tuple(pauses), wait, trace
        self._state = TrackerState(step=after_step) if state is None else TrackerState.read(state)
        self._follower = Follower(run.folder, self._state.step, rollouts_every)
        self._failed_before, self._handed_over = False, handed_over
        self._begun: Begun | None = None
        self.missing: list[int] = []

    @property
    def step(self) -> int:
        """The last step that was handed over."""
        return self._state.step

    def begin(self) -> str | None:
        """Begin the tracker's run; where people find it, or None if that failed."""
        try:
            if self._begun is None:
                self._begun = self._sink.begin(replace(self._run, run_id=self._state.run_id))
            self._remember(replace(self._state, run_id=self._begun.run_id))
        except Exception as error:
            self._tell(error, "could not begin")
            return None
        return self._begun.where

    def deliver(self, up_to: int) -> bool:
        """Hand over what was written up to this step; False if the run's files are in the way, so that a later call
        has to."""
        try:
            for logged in self._follower.read(up_to):
                self._remember(replace(self._state, step=logged.step))
                if not self._hand_over(logged):
                    self.missing.append(logged.step)
                self._handed_over(logged.step)
        except OSError as error:
            self._tell(error, "cannot be supplied from the run's files")
            return False
        return True

    def finish(self, failed: bool) -> None:
        """End the tracker's run."""
        try:
            self._sink.finish(failed)
        except Exception as error:
            self._tell(error, "could not end its run")

    def _hand_over(self, logged: Logged) -> bool:
        """Apart from each other: a picture that is damaged costs no number, and nothing is given twice."""
        step = logged.step
        shown = not logged.rows or self._try(step, lambda: self._sink.rollouts(step, logged.rows))
        return self._try(step, lambda: self._sink.scalars(step, logged.scalars)) and shown

    def _try(self, step: int, give: Callable[[], None]) -> bool:
        for pause in (*self._pauses, None):
            try:
                give()
            except Exception as error:
                self._tell(error, f"failed in step {step}")
            else:
                return True
            if pause is None or not self._wait(pause):
                break
        return False

    def _tell(self, error: Exception, what: str) -> None:
        self._trace(error)
        if self._failed_before:
            return
        self._failed_before = True
        said = printable(f"{type(error).__name__}: {error}", ERROR_CHARACTERS)
        self._warn(f"observe.trackers: {self._name} {what} ({said}). The run goes on; metrics.jsonl has everything.")

    def _remember(self, state: TrackerState) -> None:
        if self._path is not None:
            state.write(self._path)
        self._state = state

"""What feeds a tracker: the interface, what it is told about the run, and accelerate's tracker without its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.trackers.table import Row


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns about a run.

    Args:
        folder: the run's.
        project: the name under which the tracker files runs.
        name: of the run.
        config: the run's settings, flat: ``{"rollout.num_generations": 8}``.
        run_id: of the tracker's run that is continued; None begins one.
        resume_step: the step the run continues after; None for a new run.
        pid: process id of the trainer.
    """

    folder: RunFolder
    project: str
    name: str
    config: Mapping[str, Any]
    run_id: str | None = None
    resume_step: int | None = None
    pid: int = 0


@dataclass(frozen=True)
class Begun:
    """A tracker's run: its id, by which it is continued, and where people find it."""

    run_id: str | None
    where: str


class Sink(Protocol):
    """Feeds one tracker. Any method may raise whatever the tracker raises; all but ``finish`` are called again then."""

    def begin(self, run: TrackedRun) -> Begun:
        """Begin the tracker's run, or continue it, and log the configuration."""

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Log sample rollouts of a step whose numbers come next."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's numbers, tagged ``<phase>/<key>``; they end the step."""

    def finish(self, failed: bool) -> None:
        """End the tracker's run and send what is left; ``failed``: the run ended in an error."""


def start(tracker: Any) -> None:
    """Start one of ``accelerate.tracking``'s trackers in this process.

    They ask ``accelerate.PartialState`` whether to log, and so does accelerate's logger, which they tell of every
    call. Making that state joins or forms process groups and chooses a device, next to the trainer's own. Who logs has
    been decided already, so it is not asked: the logger writes as any logger does.
    """
    from accelerate import tracking

    tracking.logger.log = tracking.logger.logger.log
    tracker.main_process_only = False
    tracker.start()

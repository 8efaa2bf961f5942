"""Trackers (``observe.trackers``): a run's metrics and sample rollouts in tensorboard, wandb, swanlab or mlflow.

Each tracker has a daemon thread that reads metrics.jsonl and rollouts.jsonl as they grow and calls accelerate's
tracker. Training never waits for it: whatever it raises and however long it takes, the two files hold everything.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import parse_json_line, write_json_atomic
from vlm_pg.metrics import RESERVED_KEYS
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.settings import ObserveSettings
from vlm_pg.observe.text import dotted
from vlm_pg.observe.tracker_adapters import (
    Adapter,
    MlflowAdapter,
    Row,
    SwanlabAdapter,
    TensorboardAdapter,
    TrackedRun,
    WandbAdapter,
)

# A tracker that is away for a minute misses nothing; one that refuses a step delays the others no longer.
STEP_PAUSES = (2.0, 10.0, 45.0)
START_PAUSES = (5.0, 30.0, 60.0)
# Steps wait this long before the tracker is reported to hang.
STALL_SECONDS = 600.0
# The end of a run reports a tracker that takes longer.
QUIET_SECONDS = 2.0
_GOES_ON = "The run goes on; metrics.jsonl has everything."


# By the name of the setting, which is the module's.
ADAPTERS: dict[str, type[Adapter]] = {
    "tensorboard": TensorboardAdapter,
    "wandb": WandbAdapter,
    "swanlab": SwanlabAdapter,
    "mlflow": MlflowAdapter,
}


def is_installed(module: str) -> bool:
    """Whether a package can be imported; a folder of its name (wandb creates one where it is started) is no package."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def refuse_missing(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker that is not installed; imports none of them."""
    for name in names:
        if not is_installed(name):
            others = [other for other in names if other != name]
            raise ConfigError(
                f"observe.trackers names {name}, which is not installed. It is optional: install it with "
                f"'pip install {ADAPTERS[name].packages or name}', or set observe.trackers=[{','.join(others)}]."
            )


class Trackers:
    """Sends a run's steps to its trackers; a context manager, on the rank that writes the run's folder.

    Open metrics.jsonl and rollouts.jsonl (shortened, where a run resumes) before.

    Args:
        resume_step: the step after which the run resumes; None for a new run.
        info, warn: print a line.
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
        self._tracker_seconds = settings.tracker_seconds
        config = yaml.safe_load(folder.config.read_bytes()) if folder.config.is_file() else {}
        # Lists become text.
        flat = {
            key: value if isinstance(value, bool | int | float | str | None) else str(value)
            for key, value in dotted(config)
        }
        run, every = TrackedRun(folder, settings.project, name, flat, None, resume_step), settings.track_rollouts_every
        self._feeds = [TrackerFeed(tracker, run, every, info, warn) for tracker in settings.trackers]

    def step_done(self, step: int) -> None:
        """Both files are complete up to this step. Returns at once."""
        for feed in self._feeds:
            feed.step_done(step)

    def close(self, failed: bool = False, seconds: float | None = None) -> None:
        """End the trackers' runs; waits ``observe.tracker_seconds`` by default, for all together."""
        end = time.monotonic() + (self._tracker_seconds if seconds is None else seconds)
        for feed in self._feeds:
            feed.finish(failed)
        for feed in self._feeds:
            feed.wait(end)
        self._feeds = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A second Ctrl-C, while the run stops, ends it at once.
        self.close(failed=kind is not None, seconds=0.0 if kind is KeyboardInterrupt else None)


class TrackerFeed:
    """The thread of one tracker.

    A step is recorded as sent before it is: a process killed in between leaves a gap in the tracker, and never a step
    twice.

    Args:
        every: send rollouts in the first step and in multiples of this; 0 never sends any.
    """

    def __init__(
        self, name: str, run: TrackedRun, every: int, info: Callable[[str], None], warn: Callable[[str], None]
    ):
        self._name, self._run, self._info, self._warn = name, run, info, warn
        self._adapter = ADAPTERS[name]()
        self._home = run.folder.trackers
        self._log = self._home / f"{name}.log"
        self._state_path = self._home / f"{name}.json" if self._adapter.is_resumable else None
        self._sent = SentSteps(step=run.resume_step or 0)
        if self._state_path is not None:
            self._sent = SentSteps.read(self._state_path)
            if run.resume_step is not None and self._sent.step > run.resume_step:
                info(
                    f"{name} has the steps up to {self._sent.step} already: those from {run.resume_step + 1} on are "
                    "not sent again"
                )
        self._steps = StepReader(run.folder, self._sent.step, every)
        self._address: str | None = None
        # Steps that an earlier process did not send are sent now.
        self._complete, self._delivered = run.resume_step or 0, self._sent.step
        self._failed = self._has_started = self._has_warned = self._has_stalled = False
        self._missing: list[int] = []
        self._progress_seconds = time.monotonic()
        self._changed, self._finished = threading.Event(), threading.Event()
        self._changed.set()
        self._thread = threading.Thread(target=self._serve, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def step_done(self, step: int) -> None:
        if self._complete <= self._delivered:
            self._progress_seconds = time.monotonic()
        self._complete = max(self._complete, step)
        self._changed.set()
        seconds = time.monotonic() - self._progress_seconds
        if not self._has_stalled and seconds > STALL_SECONDS:
            self._has_stalled = True
            self._warn_of(f"has taken nothing for {seconds:.0f} s and is at step {self._delivered}. {_GOES_ON}")

    def finish(self, failed: bool) -> None:
        self._failed = failed
        self._finished.set()
        self._changed.set()

    def wait(self, end: float) -> None:
        """Wait for the thread until ``time.monotonic()`` reaches ``end``, and report what is missing."""
        self._thread.join(max(0.0, min(QUIET_SECONDS, end - time.monotonic())))
        if self._thread.is_alive() and end > time.monotonic():
            self._info(f"{self._name}: sending what is left (observe.tracker_seconds limits it)")
            self._thread.join(max(0.0, end - time.monotonic()))
        state = (
            f"It was given the steps up to {self._delivered} of {self._complete}; metrics.jsonl has them all, and a "
            "resumed run sends the others."
        )
        if self._thread.is_alive():
            self._warn_of(f"was still sending and was left (the end of a run waits observe.tracker_seconds). {state}")
            return
        if not self._has_started:
            self._warn_of("could not start while the run lasted. metrics.jsonl has everything.")
        if self._missing:
            steps = f"{len(self._missing)} of the steps {self._missing[0]} to {self._missing[-1]}"
            self._warn_of(f"did not take {steps}, or not in full. metrics.jsonl has them.")
        if self._has_started and self._delivered < self._complete:
            self._warn_of(f"is incomplete. {state}")

    def _serve(self) -> None:
        """The thread: start the tracker's run, send each step once it is complete, end the tracker's run."""
        pauses = chain(START_PAUSES, repeat(START_PAUSES[-1]))
        while not self._attempt("could not start", self._start):
            if self._finished.wait(next(pauses)):
                return
        self._has_started = True
        self._progress_seconds = time.monotonic()
        is_last = False
        while not is_last:
            self._changed.wait()
            self._changed.clear()
            is_last = self._finished.is_set()  # read before the step, which was set before
            self._attempt("cannot be supplied from the run's files", self._send_up_to, self._complete)
        self._attempt("could not end its run", self._adapter.finish, self._failed)

    def _start(self) -> None:
        if self._state_path is not None:
            self._home.mkdir(exist_ok=True)
        if self._address is None:
            self._address = self._adapter.start(replace(self._run, run_id=self._sent.run_id))
        self._remember(self._sent._replace(run_id=self._adapter.run_id))
        if self._state_path is not None:
            self._info(f"{self._name}: {self._address}")

    def _send_up_to(self, complete: int) -> None:
        for step, scalars, rows in self._steps.read(complete):
            self._remember(self._sent._replace(step=step))
            # Separately: a damaged picture costs no number, and nothing is sent twice.
            are_shown = not rows or self._try_step(step, self._adapter.log_rollouts, rows)
            if not self._try_step(step, self._adapter.log_scalars, scalars) or not are_shown:
                self._missing.append(step)
            self._delivered, self._progress_seconds = step, time.monotonic()
        self._delivered = max(self._delivered, complete)

    def _try_step(self, step: int, send: Callable[[int, Any], None], values: Any) -> bool:
        for pause in STEP_PAUSES:
            if self._attempt(f"failed in step {step}", send, step, values):
                return True
            if self._finished.wait(pause):
                return False
        return self._attempt(f"failed in step {step}", send, step, values)

    def _attempt(self, failure: str, call: Callable[..., object], *arguments: Any) -> bool:
        """Whether the call returned. The first error of all is printed, every one is in the tracker's log."""
        try:
            call(*arguments)
        except (Exception, SystemExit) as error:
            with suppress(OSError), self._log.open("a") as file:
                traceback.print_exception(error, file=file)
            if not self._has_warned:
                self._has_warned = True
                words = printable(f"{type(error).__name__}: {error}", 300)
                self._warn_of(f"{failure} ({words}). {_GOES_ON}")
            return False
        return True

    def _remember(self, sent: SentSteps) -> None:
        if self._state_path is not None and sent != self._sent:
            write_json_atomic(self._state_path, sent._asdict())
        self._sent = sent

    def _warn_of(self, words: str) -> None:
        more = f" ({self._log} has more.)" if self._log.exists() else ""
        self._warn(f"observe.trackers: {self._name} {words}{more}")


class SentSteps(NamedTuple):
    """``trackers/<name>.json``: the id of the tracker's run, and the last step that was sent."""

    run_id: str | None = None
    step: int = 0

    @classmethod
    def read(cls, path: Path) -> SentSteps:
        """An empty state without a file, or with one that cannot be read."""
        found: dict[str, Any] = {}
        with suppress(OSError):
            found = parse_json_line(path.read_bytes()) or {}
        run_id, step = found.get("run_id"), found.get("step")
        return cls(run_id if isinstance(run_id, str) else None, step if type(step) is int else 0)


class StepReader:
    """Reads the steps of metrics.jsonl and rollouts.jsonl as the files grow, each step once.

    Args:
        after_step: steps up to this one are left out.
        every: rollouts are read in the first step and in multiples of this; 0: never.
    """

    def __init__(self, folder: RunFolder, after_step: int, every: int):
        self._folder, self._after_step, self._every = folder, after_step, every
        self._offsets: defaultdict[Path, int] = defaultdict(int)
        self._waiting: list[dict[str, Any]] = []
        self._rows: defaultdict[tuple[int, str], list[Row]] = defaultdict(list)

    def read(self, up_to: int) -> Iterator[tuple[int, dict[str, float], list[Row]]]:
        """(step, scalars tagged ``<phase>/<key>``, rows) of the steps up to this one, whose lines must all be written.

        A step counts as read when the next one is requested: if sending raises, it comes again.
        """
        self._waiting += self._new_lines(self._folder.metrics)
        for record in self._new_lines(self._folder.rollouts) if self._every else ():
            if record["step"] == 1 or record["step"] % self._every == 0:
                with suppress(KeyError, TypeError, AttributeError):  # JSON, but no rollout
                    self._rows[record["step"], record["phase"]].append(Row.of(record, self._folder.path))
        while self._waiting and self._waiting[0]["step"] <= up_to:
            line = self._waiting[0]
            step, phase = line["step"], line["phase"]
            numbers = {key: line[key] for key in line if key not in RESERVED_KEYS}
            scalars = {f"{phase}/{key}": value for key, value in numbers.items() if isinstance(value, int | float)}
            yield step, scalars, self._rows.get((step, phase), [])
            self._waiting.pop(0)
            self._rows.pop((step, phase), None)

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """Whole lines behind those read before, of steps that are wanted."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offsets[path] += len(line)
                record = parse_json_line(line) or {}
                step = record.get("step")
                if type(step) is int and step > self._after_step and isinstance(record.get("phase"), str):
                    yield record

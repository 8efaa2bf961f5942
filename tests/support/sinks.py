"""Trackers that misbehave, for the process that feeds a tracker. What reaches them is in ``sink.jsonl`` of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.observe.trackers.sink import Begun, TrackedRun
from vlm_pg.observe.trackers.table import Row


class Recording:
    """Takes everything."""

    path: Path
    shown: Sequence[str] = ()

    def begin(self, run: TrackedRun) -> Begun:
        self.path = run.folder.path / "sink.jsonl"
        self.note(begin=run.name, project=run.project, run_id=run.run_id, config=dict(run.config), pid=os.getpid())
        return Begun(run.run_id or "fresh", f"at {self.path.name}")

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self.shown = [row.response for row in rows]

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.note(step=step, scalars=dict(scalars), rows=self.shown)
        self.shown = ()

    def finish(self, failed: bool) -> None:
        self.note(failed=failed)

    def note(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


class Chatty(Recording):
    """Prints, and reads its input, as packages do that ask for a key."""

    def begin(self, run: TrackedRun) -> Begun:
        print("printed by the tracker", flush=True)
        print("complained by the tracker", file=sys.stderr, flush=True)
        assert sys.stdin.read() == ""
        return super().begin(run)


class Raising(Recording):
    """Refuses every step."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        super().scalars(step, scalars)
        raise ConnectionError(f"no route to host,\nstep {step}")


class NeverBegins(Recording):
    """Has no key."""

    def begin(self, run: TrackedRun) -> Begun:
        raise PermissionError("no API key configured")


class Hanging(Recording):
    """Never comes back from its second step, nor does what it has started."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        super().scalars(step, scalars)
        while step == 2:
            time.sleep(1.0)


class Dying(Recording):
    """Takes its process with it, and leaves one behind that it has started."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        super().scalars(step, scalars)
        self.note(child=subprocess.Popen(["sleep", "1000"]).pid)
        os._exit(3)


class Blind(Recording):
    """Takes no pictures."""

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self.note(tried=step)
        raise ValueError("broken PNG")

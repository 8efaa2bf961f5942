"""Weights & Biases. ``WANDB_MODE=offline`` writes the run into ``trackers/wandb`` for a later ``wandb sync``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.observe.trackers.sink import Begun, TrackedRun, start
from vlm_pg.observe.trackers.table import COLUMNS, Row


class WandbSink:
    """Feeds wandb. It ignores steps before the last one it has, so a continued run gets none twice."""

    _tracker: Any
    _run_id: str | None = None

    def begin(self, run: TrackedRun) -> Begun:
        """Begin or continue the run whose id the run's folder keeps."""
        import wandb
        from accelerate.tracking import WandBTracker

        home = run.folder.trackers.absolute()
        # Pictures of tables wait here for their upload; by default that is the user's home, which may be small.
        os.environ.setdefault("WANDB_DATA_DIR", str(home / "wandb-data"))
        self._run_id = run.run_id or self._run_id or secrets.token_hex(4)
        self._tracker = WandBTracker(
            run.project,
            name=run.name,
            id=self._run_id,
            resume="allow",
            dir=str(home),
            # What the trainer prints goes past this process, and what is measured is the trainer.
            settings=wandb.Settings(console="off", x_stats_pid=run.pid, program="vlm-pg train"),
        )
        start(self._tracker)
        self._tracker.store_init_configuration(dict(run.config))
        there = self._tracker.tracker
        offline = f"offline, to be sent with wandb sync {there.dir.removesuffix('/files')}"
        return Begun(self._run_id, there.url or offline)

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """A table ``rollouts`` with a picture a row."""
        self._tracker.log_table("rollouts", columns=[*COLUMNS, "frames"], data=_cells(rows), step=step)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """All of the step's numbers."""
        # Ends the step: one that is open is lost with its process.
        self._tracker.log(dict(scalars), step=step, commit=True)

    def finish(self, failed: bool) -> None:
        """Send what is left."""
        if failed:
            self._tracker.tracker.finish(exit_code=1)
        else:
            self._tracker.finish()


def _cells(rows: Sequence[Row]) -> list[list[Any]]:
    import wandb

    pictures = {row.picture: wandb.Image(str(row.picture)) for row in rows if row.picture is not None}
    return [[*row.cells, None if row.picture is None else pictures[row.picture]] for row in rows]

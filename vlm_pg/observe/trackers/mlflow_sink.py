"""MLflow, at ``MLFLOW_TRACKING_URI`` or where it keeps runs by default."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.observe.trackers.sink import Begun, TrackedRun, start
from vlm_pg.observe.trackers.table import COLUMNS, Row

_NOT_IN_KEYS = re.compile(r"[^:/\w.\- ]")
_MAX_KEY = 250


class MlflowSink:
    """Feeds mlflow. It keeps every value it is given, so no step may be given twice."""

    _tracker: Any
    _run_id: str | None = None
    _step_and_time: tuple[int, int] = (0, 0)

    def begin(self, run: TrackedRun) -> Begun:
        """Begin a run, or continue the one whose id the run's folder keeps; a run's parameters cannot be changed."""
        import mlflow
        from accelerate.tracking import MLflowTracker

        mlflow.end_run()  # of a beginning that failed half way
        self._tracker = MLflowTracker(run.project, run_name=run.name, run_id=run.run_id or self._run_id)
        start(self._tracker)
        info = self._tracker.tracker.info
        self._run_id = info.run_id
        known = mlflow.get_run(info.run_id).data.params
        config = {_key(name): value for name, value in run.config.items()}
        self._tracker.store_init_configuration({name: value for name, value in config.items() if name not in known})
        if run.folder.config.is_file():
            self._tracker.log_artifact(str(run.folder.config))
        return Begun(info.run_id, f"experiment {run.project}, run {info.run_name} ({info.run_id})")

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """A table ``rollouts/step-000025.json`` with a picture a row where every row has one."""
        import mlflow

        mlflow.log_table(_columns(rows), artifact_file=f"rollouts/step-{step:06d}.json")

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """All of the step's numbers."""
        # A database takes the same value of the same time once: after an answer that was lost, too.
        if self._step_and_time[0] != step:
            self._step_and_time = step, time.time_ns() // 1_000_000
        numbers = {_key(name): number for name, number in scalars.items()}
        self._tracker.log(numbers, step=step, timestamp=self._step_and_time[1])

    def finish(self, failed: bool) -> None:
        """End the run."""
        import mlflow

        if failed:
            mlflow.end_run(status="FAILED")
        else:
            self._tracker.finish()


def _key(name: str) -> str:
    return _NOT_IN_KEYS.sub("_", name)[:_MAX_KEY]


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [row.cells[place] for row in rows] for place, name in enumerate(COLUMNS)}
    if all(row.picture is not None for row in rows):
        from PIL import Image

        columns["frames"] = [_loaded(Image.open(row.picture)) for row in rows if row.picture is not None]
    return columns


def _loaded(picture: Any) -> Any:
    with picture:
        return picture.convert("RGB")

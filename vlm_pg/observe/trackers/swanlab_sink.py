"""SwanLab. ``SWANLAB_MODE=offline`` writes the run into ``trackers/swanlab`` for a later ``swanlab sync``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_pg.observe.trackers.sink import Begun, TrackedRun, start
from vlm_pg.observe.trackers.table import COLUMNS, Row, pictures

# pyecharts takes what stands between two of these out of the JSON it writes, wherever they come from.
_PLACEHOLDER = "--x_x--0_0--"


class SwanlabSink:
    """Feeds swanlab. Of a key's values in one step it keeps the first."""

    _tracker: Any
    _run_id: str | None = None

    def begin(self, run: TrackedRun) -> Begun:
        """Begin or continue the experiment whose id the run's folder keeps."""
        from accelerate.tracking import SwanLabTracker

        self._run_id = run.run_id or self._run_id or secrets.token_hex(8)
        home = run.folder.trackers.absolute() / "swanlab"
        self._tracker = SwanLabTracker(run.project, name=run.name, id=self._run_id, resume="allow", log_dir=str(home))
        start(self._tracker)
        self._tracker.store_init_configuration(dict(run.config))
        swanlab_run = self._tracker.tracker
        online = swanlab_run.mode == "online"
        return Begun(self._run_id, swanlab_run.url if online else f"{swanlab_run.mode}, in {swanlab_run.dir}")

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """A table ``rollouts``, and the questions' pictures as ``frames``."""
        self._tracker.log(_media(rows), step=step)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """All of the step's numbers."""
        self._tracker.log(dict(scalars), step=step)

    def finish(self, failed: bool) -> None:
        """Send what is left."""
        if failed:
            self._tracker.tracker.finish(state="crashed", error="the run ended in an error")
        else:
            self._tracker.finish()


def _media(rows: Sequence[Row]) -> dict[str, Any]:
    import swanlab

    table = swanlab.echarts.Table()
    table.add(list(COLUMNS), [[_cell(cell) for cell in row.cells] for row in rows])
    shown: dict[str, Any] = {"rollouts": table}
    images = [swanlab.Image(str(path), caption=sample) for path, sample in pictures(rows).items()]
    return shown | {"frames": images} if images else shown


def _cell(value: str | float | None) -> str:
    """Tables here have texts only, and no missing values."""
    if isinstance(value, str):
        return value.replace(_PLACEHOLDER, _PLACEHOLDER.replace("_", "-"))
    return "no value" if value is None else f"{value:.4g}"

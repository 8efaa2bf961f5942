"""tensorboard: event files in the run's folder, written by the trainer itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from vlm_pg.observe.trackers.sink import Begun, TrackedRun, start
from vlm_pg.observe.trackers.table import Row, pictures


class TensorboardSink:
    """Feeds tensorboard. A resumed run tells it which later steps of earlier files no longer count."""

    _tracker: Any

    def begin(self, run: TrackedRun) -> Begun:
        """Open a new event file beside those that are there."""
        from accelerate.tracking import TensorBoardTracker
        from torch.utils.tensorboard.summary import hparams

        purge_step = None if run.resume_step is None else run.resume_step + 1
        self._tracker = TensorBoardTracker("", str(run.folder.tensorboard), purge_step=purge_step)
        start(self._tracker)
        # Its own store_init_configuration adds a folder with a further run at every start.
        config = {key: value for key, value in run.config.items() if value is not None}
        experiment, begin, _ = hparams(config, {})
        for summary in (experiment, begin):
            self._tracker.writer.file_writer.add_summary(summary)
        return Begun(None, str(run.folder.tensorboard))

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """All of the step's numbers."""
        self._tracker.log(dict(scalars), step=step)

    def rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Of each question its rollouts as text ``rollouts/1``, and its pictures as ``rollouts/1/frames``."""
        for place, (_, group) in enumerate(groupby(rows, key=lambda row: row.sample), 1):
            self._log_question(f"rollouts/{place}", list(group), step)

    def finish(self, failed: bool) -> None:
        """Close the event file."""
        self._tracker.finish()

    def _log_question(self, tag: str, rows: Sequence[Row], step: int) -> None:
        import numpy as np
        from PIL import Image

        self._tracker.log({tag: as_code(rows)}, step=step)
        for path in pictures(rows):
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))[None]
            self._tracker.log_images({f"{tag}/frames": pixels}, step, dataformats="NHWC")
        self._tracker.writer.flush()


def as_code(rows: Sequence[Row]) -> str:
    """A question and its rollouts as one block of Markdown's indented code, in which nothing is markup."""
    first = rows[0]
    lines = [f"sample {first.sample}", "question", first.question, f"answer {first.answer}"]
    for number, row in enumerate(rows):
        reward = "no value" if row.reward is None else f"{row.reward:.3f}"
        advantage = "no value" if row.advantage is None else f"{row.advantage:+.3f}"
        lines += ["", f"rollout {number}: reward {reward} ({row.parts}), advantage {advantage}", row.response]
    # Every line end that a reader of Markdown may know, so that none begins a line outside of the block.
    return "\n".join(f"    {line}" for text in lines for line in (text.splitlines() or [""]))

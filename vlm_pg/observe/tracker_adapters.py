"""One adapter for each tracker library, on top of ``accelerate.tracking``; text of models and data is never markup."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.text import visible

# Tracker pages show a table as a whole.
MAX_CHARACTERS = 10_000
COLUMNS = ("sample", "question", "answer", "response", "reward", "advantage")
# pyecharts (swanlab's tables) cuts the text between two of these out of the JSON it writes.
_PYECHARTS_MARK = "--x_x--0_0--"
_NOT_IN_MLFLOW_KEYS = re.compile(r"[^:/\w.\- ]")
_MLFLOW_KEY_CHARACTERS = 250


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    Args:
        project: the name under which the tracker groups runs.
        config: the run's settings, flat: ``{"rollout.num_generations": 8}``.
        run_id: id of the tracker's run to continue; None starts a new one.
        resume_step: the step after which the run resumes; None for a new run.
    """

    folder: RunFolder
    project: str
    name: str
    config: Mapping[str, Any]
    run_id: str | None = None
    resume_step: int | None = None


class Row(NamedTuple):
    """A rollout in a tracker's table: ``COLUMNS``, then the reward's parts and the question's picture strip."""

    sample: str
    question: str
    answer: str
    response: str
    reward: float | None
    advantage: float | None
    parts: str
    picture: Path | None

    @classmethod
    def of(cls, record: Mapping[str, Any], folder: Path) -> Row:
        """The row of a line of rollouts.jsonl; ``folder`` is the run's."""
        picture = folder / record["thumbnails"] if record.get("thumbnails") else None
        return cls(
            _shortened(record["sample_id"]),
            _shortened("\n".join((record["question"], *record["options"]))),
            _shortened(record["answer"]),
            _shortened(record["response"] + ("" if record["finish_reason"] == "stop" else " [cut off]")),
            record["total"],
            record["advantage"],
            _shortened(", ".join(f"{name} {json.dumps(value)}" for name, value in record["parts"].items())),
            picture if picture is not None and picture.is_file() else None,
        )


def _shortened(text: str) -> str:
    text = visible(text)
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _pictures(rows: Sequence[Row]) -> dict[Path, str]:
    """Each picture strip once, with its sample id."""
    return {row.picture: row.sample for row in rows if row.picture is not None}


class Adapter:
    """Feeds one tracker; any method may raise what the library raises, and is called again except for ``finish``.

    Attributes:
        packages: that pip installs; "" for the one named like the tracker.
        is_resumable: the tracker's run goes on under its id after a resume, and takes no step twice.
        run_id: the tracker's id of the run, once it has started.
        tracker: accelerate's tracker.
    """

    packages = ""
    is_resumable = True
    run_id: str | None = None
    tracker: Any

    def start(self, run: TrackedRun) -> str:
        """Start or continue the tracker's run and log the configuration; returns its address."""
        raise NotImplementedError

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Log sample rollouts of a step; its scalars follow."""
        raise NotImplementedError

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's numbers, tagged ``<phase>/<key>``; they complete the step."""
        self.tracker.log(dict(scalars), step=step)

    def finish(self, failed: bool) -> None:
        """End the tracker's run and send what is left; ``failed``: the run ended in an error."""
        self.tracker.finish()

    def _start(self, tracker: Any) -> None:
        """Start accelerate's tracker without ``accelerate.PartialState``.

        The trackers, and accelerate's logger, ask that state whether this process logs. Creating it would join or form
        process groups and choose a device beside the trainer's own.
        """
        from accelerate import tracking

        tracking.logger.log = tracking.logger.logger.log
        tracker.main_process_only = False
        tracker.start()
        self.tracker = tracker


class TensorboardAdapter(Adapter):
    """tensorboard: event files in the run's folder. A resumed run purges the later steps of earlier files."""

    is_resumable = False

    def start(self, run: TrackedRun) -> str:
        from accelerate.tracking import TensorBoardTracker
        from torch.utils.tensorboard.summary import hparams

        purge_step = None if run.resume_step is None else run.resume_step + 1
        self._start(TensorBoardTracker("", str(run.folder.tensorboard), purge_step=purge_step))
        # Its own store_init_configuration adds a folder with a further run at every start.
        experiment, start, _ = hparams({key: value for key, value in run.config.items() if value is not None}, {})
        for summary in (experiment, start):
            self.tracker.writer.file_writer.add_summary(summary)
        return str(run.folder.tensorboard)

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Per question its rollouts as text ``rollouts/1``, and its pictures as ``rollouts/1/frames``."""
        import numpy as np
        from PIL import Image

        for number, (_, group) in enumerate(groupby(rows, key=lambda row: row.sample), 1):
            of_question = list(group)
            self.tracker.log({f"rollouts/{number}": _as_code(of_question)}, step=step)
            for path in _pictures(of_question):
                with Image.open(path) as picture:
                    pixels = np.asarray(picture.convert("RGB"))[None]
                self.tracker.log_images({f"rollouts/{number}/frames": pixels}, step, dataformats="NHWC")
            self.tracker.writer.flush()


def _as_code(rows: Sequence[Row]) -> str:
    """A question and its rollouts as one indented code block of Markdown, in which nothing is markup."""
    first = rows[0]
    lines = [f"sample {first.sample}", "question", first.question, f"answer {first.answer}"]
    for number, row in enumerate(rows):
        reward = "no value" if row.reward is None else f"{row.reward:.3f}"
        advantage = "no value" if row.advantage is None else f"{row.advantage:+.3f}"
        lines += ["", f"rollout {number}: reward {reward} ({row.parts}), advantage {advantage}", row.response]
    # Every line end that a Markdown reader may know, so that no line starts outside of the block.
    return "\n".join(f"    {line}" for text in lines for line in (text.splitlines() or [""]))


class WandbAdapter(Adapter):
    """Weights & Biases. ``WANDB_MODE=offline`` writes the run into ``trackers/wandb`` for a later ``wandb sync``."""

    def start(self, run: TrackedRun) -> str:
        import wandb
        from accelerate.tracking import WandBTracker

        home = run.folder.trackers.absolute()
        # Pictures of tables wait here for their upload; by default in the user's home, which may be small.
        os.environ.setdefault("WANDB_DATA_DIR", str(home / "wandb-data"))
        self.run_id = run.run_id or self.run_id or secrets.token_hex(4)
        settings = wandb.Settings(console="off", silent=True, program="vlm-pg train")
        options = {"name": run.name, "id": self.run_id, "resume": "allow", "dir": str(home), "settings": settings}
        self._start(WandBTracker(run.project, **options))
        self.tracker.store_init_configuration(dict(run.config))
        started = self.tracker.tracker
        offline = f"offline, to be sent with wandb sync {started.dir.removesuffix('/files')}"
        return offline if started.offline else str(started.url)

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """A table ``rollouts`` with a picture per row."""
        import wandb

        pictures = {path: wandb.Image(str(path)) for path in _pictures(rows)}
        cells = [[*row[: len(COLUMNS)], pictures.get(row.picture) if row.picture else None] for row in rows]
        self.tracker.log_table("rollouts", columns=[*COLUMNS, "frames"], data=cells, step=step)

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        # commit: an open step is lost with its process.
        self.tracker.log(dict(scalars), step=step, commit=True)

    def finish(self, failed: bool) -> None:
        import wandb

        self.tracker.tracker.finish(exit_code=int(failed))
        wandb.teardown()  # ends its service, which writes the rest: here, and not at the process's exit


class SwanlabAdapter(Adapter):
    """SwanLab. ``SWANLAB_MODE=offline`` writes the run into ``trackers/swanlab`` for a later ``swanlab sync``."""

    def start(self, run: TrackedRun) -> str:
        from accelerate.tracking import SwanLabTracker

        self.run_id = run.run_id or self.run_id or secrets.token_hex(8)
        options = {"log_dir": str(run.folder.trackers.absolute() / "swanlab"), "resume": "allow"}
        self._start(SwanLabTracker(run.project, name=run.name, id=self.run_id, **options))
        self.tracker.store_init_configuration(dict(run.config))
        started = self.tracker.tracker
        return started.url if started.mode == "online" else f"{started.mode}, in {started.dir}"

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """A table ``rollouts``, and the questions' pictures as ``frames``."""
        import swanlab

        def cell(value: Any) -> str:  # tables have texts only, and no missing values
            if isinstance(value, str):
                return value.replace(_PYECHARTS_MARK, _PYECHARTS_MARK.replace("_", "-"))
            return "no value" if value is None else f"{value:.4g}"

        table = swanlab.echarts.Table()
        table.add(list(COLUMNS), [[cell(value) for value in row[: len(COLUMNS)]] for row in rows])
        images = [swanlab.Image(str(path), caption=sample) for path, sample in _pictures(rows).items()]
        self.tracker.log({"rollouts": table, **({"frames": images} if images else {})}, step=step)

    def finish(self, failed: bool) -> None:
        crashed = {"state": "crashed", "error": "the run ended in an error"}
        self.tracker.tracker.finish(**(crashed if failed else {}))


class MlflowAdapter(Adapter):
    """MLflow, at ``MLFLOW_TRACKING_URI`` or its default; it keeps every value, so no step may be sent twice."""

    packages = "mlflow-skinny sqlalchemy alembic"
    _step_and_time: tuple[int, int] = (0, 0)

    def start(self, run: TrackedRun) -> str:
        """Parameters of a continued run cannot change: only new ones are logged."""
        import mlflow
        from accelerate.tracking import MLflowTracker

        mlflow.end_run()  # of a start that failed half way
        self._start(MLflowTracker(run.project, run_name=run.name, run_id=run.run_id or self.run_id))
        info = self.tracker.tracker.info
        self.run_id = info.run_id
        known = mlflow.get_run(info.run_id).data.params
        config = {self._key(name): value for name, value in run.config.items()}
        self.tracker.store_init_configuration({name: value for name, value in config.items() if name not in known})
        if run.folder.config.is_file():
            self.tracker.log_artifact(str(run.folder.config))
        return f"experiment {run.project}, run {info.run_name} ({info.run_id})"

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """A table ``rollouts/step-000025.json`` with a picture per row where every row has one."""
        import mlflow
        from PIL import Image

        table: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
        if all(row.picture is not None for row in rows):
            pictures: dict[Path | None, Any] = {}
            for path in _pictures(rows):
                with Image.open(path) as picture:
                    pictures[path] = picture.convert("RGB")
            table["frames"] = [pictures[row.picture] for row in rows]
        mlflow.log_table(table, artifact_file=f"rollouts/step-{step:06d}.json")

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        # A database keeps equal values of one time once, also when the first answer was lost.
        if self._step_and_time[0] != step:
            self._step_and_time = step, time.time_ns() // 1_000_000
        numbers = {self._key(name): number for name, number in scalars.items()}
        self.tracker.log(numbers, step=step, timestamp=self._step_and_time[1])

    def finish(self, failed: bool) -> None:
        import mlflow

        mlflow.end_run(status="FAILED" if failed else "FINISHED")

    @staticmethod
    def _key(name: str) -> str:
        return _NOT_IN_MLFLOW_KEYS.sub("_", name)[:_MLFLOW_KEY_CHARACTERS]

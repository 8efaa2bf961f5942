"""The ``observe`` section of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from vlm_pg.settings import Settings

TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow"]


class ObserveSettings(Settings):
    """What a run writes and prints about itself. metrics.jsonl and rollouts.jsonl are always written."""

    trackers: tuple[TrackerName, ...] = Field(
        ("tensorboard",),
        description="Trackers that also get the metrics of metrics.jsonl and sample rollouts; an empty list: none.",
    )
    project: str = Field(
        "vlm_pg",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Project (mlflow: experiment) at wandb, swanlab and mlflow; the run is named run.name there.",
    )
    track_rollouts_every: int = Field(
        25,
        ge=0,
        description="Send the rollouts of rollouts.jsonl to the trackers every N steps and in the first step, as a "
        "table with pictures if they have any; 0: never.",
    )
    tracker_seconds: float = Field(
        60.0, ge=0, le=86400, description="How long the end of a run waits for trackers with pending uploads."
    )
    print_rollouts_every: int = Field(25, ge=0, description="Print a table of sample rollouts every N steps; 0: never.")
    rollouts_per_step: int = Field(
        2,
        ge=0,
        description="Number of groups per step written to rollouts.jsonl. The same questions are preferred in every "
        "epoch, so that early and late answers can be compared. 0: none.",
    )
    trace_mb: int = Field(
        64,
        ge=0,
        le=4096,
        description="Maximum size in MiB of the time line of all ranks' phases (trace.json and trace.before.json "
        "together); the oldest steps are dropped. 0: none is written.",
    )
    report: bool = Field(True, description="Write report.html at the end of the run.")
    thumbnails: int = Field(
        8, ge=0, le=32, description="Number of frames in the picture strip saved for a logged question; 0: no pictures."
    )

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        twice = sorted({name for name in value if value.count(name) > 1})
        if twice:
            raise ValueError(f"trackers names {', '.join(twice)} twice. Name each tracker once.")
        return value

"""The ``observe`` section of a configuration."""

from __future__ import annotations

from pydantic import Field

from vlm_pg.settings import Settings


class ObserveSettings(Settings):
    """What a run writes and prints about itself. metrics.jsonl and rollouts.jsonl are always written."""

    tensorboard: bool = Field(True, description="Also write the metrics as tensorboard scalars.")
    print_rollouts_every: int = Field(
        25, ge=0, description="Print a table of sample rollouts every so many steps; 0 never prints one."
    )
    rollouts_per_step: int = Field(
        2,
        ge=0,
        description="How many groups of each step go into rollouts.jsonl; the same questions are preferred every "
        "epoch, so that early and late answers can be compared. 0 writes none.",
    )
    report: bool = Field(True, description="Write report.html at the end of the run.")
    thumbnails: int = Field(
        8, ge=0, le=32, description="Frames in the picture strip saved for a logged question; 0 saves no pictures."
    )

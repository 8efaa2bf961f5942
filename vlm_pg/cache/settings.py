"""What the user can choose about what is kept on disk."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vlm_pg.settings import Settings


class CacheSettings(Settings):
    """Whether sampled frames and outputs of a frozen vision tower are kept on disk, where, and how much of them."""

    folder: Path | None = Field(
        None, description="Folder of the cache, which runs, ranks and evaluations share; none: nothing is kept on disk."
    )
    frames: bool = Field(True, description="Keep the frames of media, sampled and resized, so they are decoded once.")
    features: bool | None = Field(
        None,
        description="Keep the outputs of the vision tower, so it runs once for the same media. It must be frozen: "
        "model.train without tower and merger. null: where it is.",
    )
    max_gb: float = Field(
        100.0,
        gt=0,
        description="Most GiB of it all. For more, what was not used for longest is thrown out, but nothing that was "
        "used since the run began, nor in the day before while the run finds some of that; except features for frames.",
    )

    def impossible(self) -> list[str]:
        if self.features and self.folder is None:
            return [
                "cache.features is true and cache.folder is not set, so that there is nowhere to keep them. Set "
                "cache.folder, or leave cache.features out."
            ]
        return []

    @property
    def max_bytes(self) -> int:
        """The limit in bytes."""
        return int(self.max_gb * 2**30)

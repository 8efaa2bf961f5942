"""What the user can choose about what is kept on disk."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vlm_pg.settings import Settings


class CacheSettings(Settings):
    """Whether sampled frames and outputs of a frozen vision tower are kept on disk, where, and how much of them."""

    folder: Path | None = Field(
        None, description="Folder of the cache, shared by runs, ranks and evaluations; null: nothing is cached on disk."
    )
    frames: bool = Field(
        True, description="Cache the sampled and resized frames of media, so that they are decoded only once."
    )
    features: bool | None = Field(
        None,
        description="Cache the outputs of the vision tower, so that it runs only once for the same media. Needs a "
        "frozen tower: model.train without tower and merger. null: enabled if the tower is frozen.",
    )
    max_gb: float = Field(
        100.0,
        gt=0,
        description="Maximum size of the cache in GiB. The least recently used entries are evicted first. Not evicted: "
        "entries used since the run began, and those of the day before as long as the run still hits some of them. "
        "Exception: features may always be evicted to make space for frames.",
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

"""What is kept of a tracker between two starts of a run: ``trackers/<name>.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from vlm_pg.files import parse_json_line, write_json_atomic


@dataclass(frozen=True)
class TrackerState:
    """The tracker's run, and the last step that was handed to it."""

    run_id: str | None = None
    step: int = 0

    @classmethod
    def read(cls, path: Path) -> TrackerState:
        """What the file says; an empty state for none, or for one that cannot be read."""
        try:
            found = parse_json_line(path.read_bytes()) or {}
        except OSError:
            return cls()
        run_id, step = found.get("run_id"), found.get("step")
        return cls(run_id if isinstance(run_id, str) else None, step if type(step) is int else 0)

    def write(self, path: Path) -> None:
        """Write the file in one piece."""
        write_json_atomic(path, asdict(self))

"""Reading a run's own files as they grow, step by step: they hold all that a tracker gets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.files import parse_json_line
from vlm_pg.metrics import RESERVED_KEYS
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.trackers.table import Row, make_row


@dataclass(frozen=True)
class Logged:
    """One line of metrics.jsonl: scalars tagged ``<phase>/<key>``, and rows of the rollouts where they are due."""

    step: int
    scalars: Mapping[str, float]
    rows: Sequence[Row]


class Follower:
    """Gives every step of a run once.

    Args:
        folder: the run's.
        after_step: steps up to this one are left out.
        rollouts_every: in which steps rollouts are due: the first, and multiples of this. 0 for none.
    """

    def __init__(self, folder: RunFolder, after_step: int, rollouts_every: int):
        self._folder, self._after_step, self._every = folder, after_step, rollouts_every
        self._metrics, self._rollouts = _Tail(folder.metrics), _Tail(folder.rollouts)
        self._waiting: list[dict[str, Any]] = []
        self._rows: defaultdict[tuple[int, str], list[Row]] = defaultdict(list)

    def read(self, up_to: int) -> Iterator[Logged]:
        """The steps up to this one that were not given yet; all their lines must have been written.

        One is behind when the next is asked for: whoever fails before gets it again.
        """
        self._waiting += (line for line in self._metrics.read() if self._is_wanted(line))
        if self._every:
            for record in self._rollouts.read():
                if self._is_wanted(record) and (record["step"] == 1 or record["step"] % self._every == 0):
                    self._rows[record["step"], record["phase"]] += _rows(record, self._folder.path)
        while self._waiting and self._waiting[0]["step"] <= up_to:
            line = self._waiting[0]
            step, phase = line["step"], line["phase"]
            scalars = {f"{phase}/{key}": number for key, number in line.items() if _is_scalar(key, number)}
            yield Logged(step, scalars, self._rows.get((step, phase), []))
            self._waiting.pop(0)
            self._rows.pop((step, phase), None)

    def _is_wanted(self, line: Mapping[str, Any]) -> bool:
        step, phase = line.get("step"), line.get("phase")
        return type(step) is int and isinstance(phase, str) and step > self._after_step


def _rows(record: Mapping[str, Any], folder: Path) -> list[Row]:
    """The row of a line of rollouts.jsonl; none of a line that is JSON and no rollout."""
    try:
        return [make_row(record, folder)]
    except (KeyError, TypeError, AttributeError):
        return []


def _is_scalar(key: str, number: Any) -> bool:
    return key not in RESERVED_KEYS and isinstance(number, int | float)


class _Tail:
    """The lines of a JSONL file that were not read yet."""

    def __init__(self, path: Path):
        self._path, self._place = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._place += len(line)
                record = parse_json_line(line)
                if record is not None:
                    yield record

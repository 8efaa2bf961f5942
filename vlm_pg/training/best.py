"""The checkpoint with the best score: scored when it is written, kept by every pruning, found as ``checkpoints/best``.

The scores in the checkpoints decide; the link only points. So a save that is killed between the two loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlm_pg.training import checkpoints

LINK = "best"
# Of a checkpoint's state.
SCORE = "score"


class RunningScore:
    """The mean of one metric over the steps since the last checkpoint.

    Args:
        metric: its name; None: no checkpoint gets a score.
        latest: of the last step in place of the mean: of what is measured on the weights as they are.
    """

    def __init__(self, metric: str | None, latest: bool = False):
        self._metric, self._latest = metric, latest
        self._values: list[float] = []

    def add(self, values: Mapping[str, float | None]) -> None:
        """After every step; one in which the metric has no value does not count."""
        if self._latest:
            self._values = []
        value = None if self._metric is None else values.get(self._metric)
        if value is not None:
            self._values.append(value)

    def entry(self) -> dict[str, Any]:
        """For the state of the checkpoint that is written now; empty where there is no score."""
        if not self._values:
            return {}
        mean = sum(self._values) / len(self._values)
        return {SCORE: {"metric": self._metric, "mean": mean, "steps": len(self._values)}}

    def begin_again(self) -> None:
        """A checkpoint has been written."""
        self._values = []


def find_best(folder: Path, metric: str | None) -> Path | None:
    """The whole checkpoint with the highest score in ``metric``, of equals the newest; None where none has one."""
    scored = [(_score(path, metric), step, path) for step, path in checkpoints.find_checkpoints(folder)]
    return max(((score, step, path) for score, step, path in scored if score is not None), default=(0, 0, None))[2]


def _score(path: Path, metric: str | None) -> float | None:
    try:
        score = checkpoints.read_state(path)[SCORE]
        return float(score["mean"]) if metric is not None and score["metric"] == metric else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def point_to_best(folder: Path, metric: str | None, warn: Callable[[str], None] = print) -> Path | None:
    """Let ``folder``/best lead to the best checkpoint, which is returned; a link that leads nowhere is removed."""
    best, link = find_best(folder, metric), folder / LINK
    try:
        if best is None and link.is_symlink() and not link.exists():
            link.unlink()
        elif best is not None and not (link.is_symlink() and os.readlink(link) == best.name):
            temporary = folder / f".tmp-{LINK}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(best.name)
            temporary.replace(link)
    except OSError as error:
        warn(f"{link} could not be made to lead to {best} ({error}); that checkpoint is kept all the same")
    return best

"""Progress of long work: a bar with rate and remaining time on a terminal, a line per quarter elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Self


class Bar:
    """Counts towards a total; a context manager. ``label``: of the line or bar."""

    def __init__(self, label: str, total: int):
        self._label, self._total = label, total
        self._done = self._new = 0
        self._next_quarter = 1
        self._begun = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich import progress

            columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn(), _rate())
            self._bar = progress.Progress(*columns).__enter__()
            self._task = self._bar.add_task(self._label, total=self._total)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def advance(self, count: int, redone: bool = True) -> None:
        """Count ``count`` more; without ``redone`` an earlier run had done them, and they do not affect the rate."""
        self._done += count
        self._new += count if redone else 0
        if self._bar is not None:
            self._bar.advance(self._task, count)
            return
        if self._done * 4 >= self._next_quarter * self._total:
            self._next_quarter = self._done * 4 // max(self._total, 1) + 1
            print(f"{self._label}: {self._done:,} of {self._total:,}{self._pace()}", flush=True)

    def _pace(self) -> str:
        seconds = time.monotonic() - self._begun
        if not self._new or seconds < 1:
            return ""
        rate = self._new / seconds
        return f", {rate:,.0f}/s, {(self._total - self._done) / rate:,.0f} s left"


def _rate() -> Any:
    """A column for rich's bars, created here since rich is imported late."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:,.0f}/s" if task.speed else "")

    return Rate()

"""Lines and tables that a run prints, with a progress bar on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from vlm_pg.observe.step_line import Values, format_step, rollout_rows
from vlm_pg.observe.text import one_line, visible
from vlm_pg.types import RolloutGroup

if TYPE_CHECKING:
    import rich.console
    import rich.progress

_COLUMNS = ("question", "gold", "response", "reward", "advantage")


@dataclass
class ProgressBar:
    """Progress of one task; ``advance`` it as parts are finished."""

    on_advance: Callable[[int, str], None]
    total: int
    done: int = field(default=0)

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count ``n`` more parts as done; ``note``: its state in a few words."""
        self.done += n
        self.on_advance(self.done, note)


class Console:
    """Prints a run's lines; with ``enabled`` false (any rank but 0) it prints nothing.

    On a terminal, lines appear above a live progress bar. Elsewhere (a file, a pipe) everything is plain lines
    without colour or control codes, and progress is a line now and then.

    Args:
        enabled: false silences everything.
        stream: standard output by default.
        seconds_between_lines: of plain progress, at least.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None, seconds_between_lines: float = 10.0):
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        self._seconds_between_lines = seconds_between_lines
        self._rich: rich.console.Console | None = None
        self._bars: rich.progress.Progress | None = None
        self._open_bars = 0
        if enabled and self._stream.isatty():
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._stream, highlight=False, markup=False, emoji=False)

    def info(self, line: str) -> None:
        """Print one line."""
        self._print(line)

    def warn(self, line: str) -> None:
        """Print one line that stands out."""
        self._print(f"warning: {line}", style="yellow")

    def step_line(self, step: int, total: int, values: Values) -> None:
        """Print the line of a training step, from the values of metrics.jsonl."""
        self._print(format_step(step, total, values))

    def rollout_table(self, groups: Sequence[RolloutGroup], limit: int = 4) -> None:
        """Print at most ``limit`` sample rollouts: question, gold answer, response, rewards, advantage."""
        if not self._enabled:
            return
        rows = rollout_rows(list(groups), limit)
        if self._rich is None:
            for row in rows:
                lines = (f"    {name}: {cell}" for name, cell in zip(_COLUMNS, row, strict=True))
                self._print("\n".join(("  rollout", *lines)))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Sample rollouts", title_justify="left", show_lines=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name == "advantage" else "left", overflow="fold")
        for row in rows:
            # Text, not str: brackets in a model's answer are not markup.
            table.add_row(*(Text(cell) for cell in row))
        self._rich.print(table)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[ProgressBar]:
        """Show the progress of ``total`` parts while the block runs; blocks may be nested.

        with console.progress("evaluating", len(samples)) as bar:
            for sample in samples:
                ...
                bar.advance()
        """
        description = one_line(description)
        if not self._enabled:
            yield ProgressBar(lambda done, note: None, total)
        elif self._rich is None:
            yield from self._plain_progress(description, total)
        else:
            yield from self._live_progress(description, total)

    def _live_progress(self, description: str, total: int) -> Iterator[ProgressBar]:
        # rich allows one live display at a time: nested work is another row of the same display.
        if self._bars is None:
            self._bars = _new_bars(self._rich)
            self._bars.start()
        bars = self._bars
        row = bars.add_task(description, total=total)
        self._open_bars += 1
        try:
            yield ProgressBar(
                lambda done, note: bars.update(
                    row, completed=done, description=f"{description} ({one_line(note)})" if note else description
                ),
                total,
            )
        finally:
            self._open_bars -= 1
            if self._open_bars:
                bars.remove_task(row)
            else:
                bars.stop()
                self._bars = None

    def _plain_progress(self, description: str, total: int) -> Iterator[ProgressBar]:
        start_seconds = time.monotonic()
        last_line_seconds = start_seconds

        def on_advance(done: int, note: str) -> None:
            nonlocal last_line_seconds
            now_seconds = time.monotonic()
            if done < total and now_seconds - last_line_seconds >= self._seconds_between_lines:
                last_line_seconds = now_seconds
                left_seconds = (now_seconds - start_seconds) * (total - done) / max(done, 1)
                how = f", {one_line(note)}" if note else ""
                self._print(
                    f"{description}: {done}/{total} ({100 * done / total:.0f} %), {left_seconds:.0f} s left{how}"
                )

        bar = ProgressBar(on_advance, total)
        ended = "stopped"
        try:
            yield bar
            ended = "done"
        finally:
            self._print(f"{description}: {ended}, {bar.done}/{total} in {time.monotonic() - start_seconds:.1f} s")

    def _print(self, line: str, style: str | None = None) -> None:
        if not self._enabled:
            return
        # Ids, names and answers come from data and servers, and must not move the cursor.
        line = visible(line)
        # A terminal or file that is not UTF-8 shows what it lacks as escapes instead of stopping the run.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._rich is not None:
            self._rich.print(line, style=style, soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


def _new_bars(console: rich.console.Console | None) -> rich.progress.Progress:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
    )


def quiet_libraries() -> None:
    """No progress bars for loading a few tensors, no warning that a CPU machine has no accelerator. Errors stay."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")

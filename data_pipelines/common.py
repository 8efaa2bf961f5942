"""What the pipelines share: progress, states of files, the lock of a folder, and the gold check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from vlm_pg.errors import VlmPgError
from vlm_pg.rewards.gold import gold_faults as gold_faults

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yield the items; show a bar on a terminal, and a line for each quarter done otherwise."""
    if sys.stdout.isatty():
        from rich.progress import track

        yield from track(items, description=label, total=total)
        return
    next_line = 1
    for done, item in enumerate(items, start=1):
        yield item
        if done * 4 >= next_line * total:
            print(f"{label}: {done} of {total}", flush=True)
            next_line = done * 4 // total + 1


def run(main: Callable[..., int]) -> int:
    """Run a pipeline as a script: what the user can put right is one message on stderr and exit code 2."""
    try:
        return main()
    except VlmPgError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

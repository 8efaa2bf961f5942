"""How long each phase of a run took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Adds up seconds by phase; ``last`` holds what each phase took most recently."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start_seconds = time.perf_counter()
        try:
            yield
        finally:
            self.last[name] = time.perf_counter() - start_seconds
            self.seconds[name] = self.seconds.get(name, 0.0) + self.last[name]

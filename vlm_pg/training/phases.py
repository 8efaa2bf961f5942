"""How long each phase of a run took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class PhaseObserver(Protocol):
    """Told of every phase, in this process, as it begins and ends; phases may lie within others."""

    def begun(self, name: str) -> None: ...

    def ended(self, name: str) -> None: ...


class Phases:
    """Adds up seconds by phase: over the run in ``seconds``, since the last ``begin_step`` in ``of_step``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.of_step: dict[str, float] = {}
        self.observers: list[PhaseObserver] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self.of_step = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start_seconds = time.perf_counter()
        for observer in self.observers:
            observer.begun(name)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start_seconds
            for sums in (self.seconds, self.of_step):
                sums[name] = sums.get(name, 0.0) + seconds
            for observer in reversed(self.observers):
                observer.ended(name)

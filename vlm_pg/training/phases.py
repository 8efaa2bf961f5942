"""Seconds of each phase of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from vlm_pg.distributed import SINGLE_RANK, RankLayout

# Known waiting for other ranks.
IDLE = "idle"


class PhaseObserver(Protocol):
    """Callbacks at phase start and end, in this process; phases may be nested."""

    def begun(self, name: str) -> None: ...

    def ended(self, name: str) -> None: ...


class Phases:
    """Sums of seconds by phase: over the run in ``seconds``, since the last ``begin_step`` in ``of_step``.

    Seconds of a nested phase do not count in the outer one, so the sum over phases is the elapsed time.
    """

    def __init__(self, ranks: RankLayout = SINGLE_RANK) -> None:
        self.seconds: dict[str, float] = {}
        self.of_step: dict[str, float] = {}
        self.observers: list[PhaseObserver] = []
        self._several = ranks.world_size > 1
        self._seconds_within = 0.0

    def begin_step(self) -> None:
        """Forget the step before."""
        self.of_step = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start_seconds = time.perf_counter()
        around, self._seconds_within = self._seconds_within, 0.0
        for observer in self.observers:
            observer.begun(name)
        try:
            yield
            _synchronize()
        finally:
            seconds = time.perf_counter() - start_seconds
            for sums in (self.seconds, self.of_step):
                sums[name] = sums.get(name, 0.0) + seconds - self._seconds_within
            self._seconds_within = around + seconds
            for observer in reversed(self.observers):
                observer.ended(name)

    def waiting(self) -> AbstractContextManager[None]:
        """Around a collective of small values, in which all ranks but the last one wait."""
        if not self._several:
            return nullcontext()
        _synchronize()  # else this rank's own work would count as waiting
        return self.timed(IDLE)


def _synchronize() -> None:
    """Queued work counts in the phase that queued it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

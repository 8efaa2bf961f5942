"""Sampling of later steps in threads, while the trainer updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Jobs(Generic[T]):
    """Jobs by step (or its ``control_key``), each in a thread of its own: a server serves them together, so a slow
    rollout of one step delays no other step."""

    def __init__(self) -> None:
        self._futures: dict[int | str, Future[T]] = {}
        self._lock = threading.Lock()
        self._running, self._since, self._busy_seconds = 0, 0.0, 0.0

    def __contains__(self, step: int | str) -> bool:
        return step in self._futures

    def start(self, step: int | str, work: Callable[[], T]) -> None:
        future: Future[T] = Future()
        self._futures[step] = future
        # It ends with the process: a response may take minutes, and would keep the interpreter from exiting.
        threading.Thread(target=self._run, args=(work, future), name=f"sample step {step}", daemon=True).start()

    def result(self, step: int | str) -> T:
        """Of the job, once it is done; raises its error. It is kept until ``drop``."""
        return self._futures[step].result()

    def failure(self, step: int | str) -> BaseException | None:
        """The job's error, once it is done."""
        return self._futures[step].exception()

    def drop(self, step: int | str) -> None:
        del self._futures[step]

    def wait(self) -> None:
        """Until no job runs."""
        for future in [*self._futures.values()]:
            future.exception()

    @property
    def any_running(self) -> bool:
        return any(not future.done() for future in self._futures.values())

    def take_busy_seconds(self) -> float:
        """Seconds since the last call in which a job ran."""
        with self._lock:
            self._count()
            found, self._busy_seconds = self._busy_seconds, 0.0
        return found

    def _count(self) -> None:
        now = time.monotonic()
        if self._running:
            self._busy_seconds += now - self._since
        self._since = now

    def _run(self, work: Callable[[], T], future: Future[T]) -> None:
        with self._lock:
            self._count()
            self._running += 1
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._count()
                self._running -= 1

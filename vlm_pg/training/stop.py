"""Stopping on request: SIGTERM, SIGUSR1 or Ctrl-C set a flag that long work polls; a second Ctrl-C stops at once.

Several ranks stop together, whichever received the signal. It is published in their store, so that all end early
what they run independently; and before every collective of small values in a step they agree whether to go on, so that
no rank waits for one that has stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from vlm_pg.distributed import AgreedStop, RankLayout, SharedFlag, max_over_ranks, meet_to_stop, stopping_together

LISTENED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
POLL_SECONDS = 0.5


class StopRequest:
    """A request to stop the run. ``interrupted``: by Ctrl-C, on this rank."""

    def __init__(self, ranks: RankLayout) -> None:
        self.ranks, self.asked, self.interrupted = ranks, False, False

    def between_tokens(self) -> bool:
        """For generation, scoring and decoding. Sequence ranks that sample together wait for each other meanwhile, and
        stop at the next collective."""
        return self.asked and self.ranks.sequence_size == 1

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked; all ranks get the same answer."""
        return max_over_ranks({"stop": float(self.asked)}, device)["stop"] > 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, ranks that are asked to stop leave with InterruptedError, all at the same collective."""
        with stopping_together(lambda: self.asked):
            try:
                yield
            except AgreedStop:
                raise
            except InterruptedError:
                if self.ranks.world_size > 1:
                    meet_to_stop()
                raise

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals while the block runs, and hear of those that other ranks got."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.asked, self.interrupted = True, number == signal.SIGINT

        previous = {number: signal.signal(number, on_signal) for number in LISTENED}
        ended = threading.Event()
        watch = threading.Thread(target=self._tell_and_hear, args=(ended,), daemon=True, name="stop requests")
        try:
            if self.ranks.world_size > 1:
                watch.start()
            yield self
        finally:
            ended.set()
            if watch.is_alive():
                watch.join()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _tell_and_hear(self, ended: threading.Event) -> None:
        flag = SharedFlag("stop")
        while not ended.wait(POLL_SECONDS):
            try:
                if self.asked:
                    flag.set()
                    return
                self.asked = flag.is_set()
            except (RuntimeError, ConnectionError):  # the rank that holds the store is gone
                return

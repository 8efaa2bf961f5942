"""Stopping on request: SIGTERM, SIGUSR1 or Ctrl-C set a flag that long work polls; a second Ctrl-C stops at once.

Several ranks stop together, whichever received the signal. It is published in their store, so that all end their
independent work early; before every collective of small values in a step they agree whether to continue, so that no
rank waits for one that has stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from vlm_pg.distributed import AgreedStop, RankLayout, SharedNote, join_stop, max_over_ranks, stopping_together

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
POLL_SECONDS = 0.5


class StopRequest:
    """A request to stop the run. ``interrupted``: by Ctrl-C, on this rank."""

    def __init__(self, ranks: RankLayout) -> None:
        self.ranks, self.requested, self.interrupted = ranks, False, False

    def between_tokens(self) -> bool:
        """For generation, scoring and decoding. Sequence ranks that sample together wait for each other meanwhile, and
        stop at the next collective."""
        return self.requested and self.ranks.sequence_size == 1

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank got a request; the same answer on all ranks. A collective."""
        return max_over_ranks({"stop": float(self.requested)}, device)["stop"] > 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, ranks leave with InterruptedError on a request, all at the same collective."""
        with stopping_together(lambda: self.requested):
            try:
                yield
            except AgreedStop:
                raise
            except InterruptedError:
                if self.ranks.world_size > 1:
                    join_stop()
                raise

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals while the block runs, those of other ranks included."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.requested, self.interrupted = True, number == signal.SIGINT

        previous = {number: signal.signal(number, on_signal) for number in SIGNALS}
        ended = threading.Event()
        watch = threading.Thread(target=self._publish_and_poll, args=(ended,), daemon=True, name="stop requests")
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

    def _publish_and_poll(self, ended: threading.Event) -> None:
        note = SharedNote("stop")
        while not ended.wait(POLL_SECONDS):
            try:
                if self.requested:
                    note.write("requested")
                    return
                self.requested = note.exists()
            except (RuntimeError, ConnectionError):  # the rank that holds the store is gone
                return

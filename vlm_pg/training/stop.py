"""Stopping on request: SIGTERM or Ctrl-C set a flag that long work polls; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from vlm_pg.distributed import RankLayout, max_over_ranks


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self, ranks: RankLayout) -> None:
        self.ranks, self.asked = ranks, False

    def between_tokens(self) -> bool:
        """For generation and decoding. With several ranks they stop together at the step's end, or they would hang."""
        return self.asked and self.ranks.world_size == 1

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked; all ranks get the same answer."""
        return max_over_ranks({"stop": float(self.asked)}, device)["stop"] > 0

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle SIGTERM and SIGINT while the block runs."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.asked = True

        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

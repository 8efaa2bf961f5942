"""Generation with weights scattered over ranks, each of which is at another point.

Where weights are scattered (ZeRO-3), running a part of the model is a collective: its weights are gathered first, so
all ranks must run the same parts in the same order. In generation one rank still decodes when another is done, one
prefills while another samples. So before a part runs the ranks agree on the next one that some rank needs; ranks that
need it run it on their data, the others run it on one empty token and ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from vlm_pg.distributed import min_over_ranks

T = TypeVar("T")


class Turns:
    """The order of parts that all ranks follow together.

    Args:
        idle: for each part a run of it without effect; the same parts in the same order on every rank.
        device: where the ranks' backend exchanges numbers.

    A rank that is done calls ``finish``: it keeps running parts on nothing until all ranks are done.
    """

    def __init__(self, idle: Mapping[str, Callable[[], object]], device: torch.device):
        self._parts = list(idle)
        self._idle = dict(idle)
        self._device = device

    def run(self, part: str, work: Callable[[], T]) -> T:
        """``work()`` once all ranks have agreed on this part."""
        wanted = self._parts.index(part)
        while (chosen := self._agree(wanted)) != wanted:
            self._idle[self._parts[chosen]]()
        return work()

    def finish(self) -> None:
        """Run parts with the other ranks until all of them are done."""
        done = len(self._parts)
        while (chosen := self._agree(done)) != done:
            self._idle[self._parts[chosen]]()

    def _agree(self, wanted: int) -> int:
        return int(min_over_ranks({"part": wanted}, self._device)["part"])

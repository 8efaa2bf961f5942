"""Ranks that go through a scattered model at their own pace.

Where weights are scattered over ranks (ZeRO-3), running a part of the model is a collective: its weights are gathered
first, so all ranks must run the same parts in the same order. In generation they do not want to: one still decodes when
another is done, one prefills while another samples. So before a part is run the ranks agree on the next one that
somebody wants; who wants it runs it on his own data, the others run it on nothing and ask again.
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
        idle: for each part a run of it whose result nobody uses; the same parts in the same order on every rank.
        device: where the ranks' backend exchanges numbers.

    A rank that is done calls ``finish``: it keeps running parts on nothing until all ranks are done.
    """

    def __init__(self, idle: Mapping[str, Callable[[], object]], device: torch.device):
        self._parts = list(idle)
        self._idle = dict(idle)
        self._device = device

    def run(self, part: str, work: Callable[[], T]) -> T:
        """``work()`` as soon as it is this part's turn."""
        wanted = self._parts.index(part)
        while (chosen := self._agree(wanted)) != wanted:
            self._idle[self._parts[chosen]]()
        return work()

    def finish(self) -> None:
        """Help the other ranks until nobody wants anything any more."""
        done = len(self._parts)
        while (chosen := self._agree(done)) != done:
            self._idle[self._parts[chosen]]()

    def _agree(self, wanted: int) -> int:
        return int(min_over_ranks({"part": wanted}, self._device)["part"])

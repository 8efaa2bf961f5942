"""Ranks that stop do so together, before a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from vlm_pg.distributed.processes import host_group, is_distributed


class AgreedStop(InterruptedError):
    """Some rank was asked to stop, and all ranks have left at this place."""


_asked_to_stop: Callable[[], bool] | None = None


@contextmanager
def stopping_together(asked: Callable[[], bool]) -> Iterator[None]:
    """Inside, all ranks raise ``AgreedStop`` before a collective of numbers or objects once ``asked()`` of one is true.

    A rank that leaves by itself calls ``meet_to_stop``, which is what the others meet in place of their collective.
    """
    global _asked_to_stop
    before, _asked_to_stop = _asked_to_stop, asked
    try:
        yield
    finally:
        _asked_to_stop = before


def agree_to_go_on() -> None:
    """A collective where ranks stop together (``stopping_together``), else nothing.

    Raises:
        AgreedStop: some rank was asked to stop.
    """
    if _asked_to_stop is None:
        return
    asked = _asked_to_stop()
    if _any_rank(asked) if is_distributed() else asked:
        raise AgreedStop("asked to stop")


def no_way_back() -> None:
    """Called on all ranks: until the present ``stopping_together`` ends nobody leaves any more."""
    global _asked_to_stop
    _asked_to_stop = None


def meet_to_stop() -> None:
    """Leave the other ranks, which are about to make a collective: they leave too."""
    _any_rank(True)


def _any_rank(here: bool) -> bool:
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=host_group())
    return bool(flag.item())

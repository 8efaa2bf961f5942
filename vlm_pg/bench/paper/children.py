"""Work in processes of its own, forked from this one, several at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from vlm_pg.bench.ending import end_with_parent

Item = TypeVar("Item")


class ChildEnded(Exception):
    """A process ended without a result; the message says how."""


def in_children(
    work: Callable[[Item], Any], items: Iterable[Item], at_a_time: int
) -> Iterator[tuple[Item, Any | ChildEnded]]:
    """Each item with what ``work`` returned for it, as they are done; each in a process of its own.

    Work must not raise. A process that is killed gives ``ChildEnded`` for its item, and the others go on. All end with
    this process, also where a signal kills it.
    """
    context = multiprocessing.get_context("fork")
    todo, running = iter(items), dict[Connection, tuple[Item, Any]]()

    def start() -> None:
        for item in todo:
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=_send, args=(work, item, there, os.getpid()), daemon=True)
            child.start()
            there.close()
            running[here] = (item, child)
            return

    try:
        for _ in range(at_a_time):
            start()
        while running:
            done = wait(list(running))
            for ready in [here for here in running if here in done]:
                item, child = running.pop(ready)
                found = _received(ready, child)
                start()
                yield item, found
    finally:
        for _, child in running.values():
            child.kill()


def _send(work: Callable[[Any], Any], item: Any, there: Connection, parent: int) -> None:
    end_with_parent(parent)
    there.send(work(item))
    there.close()


def _received(here: Any, child: Any) -> Any | ChildEnded:
    try:
        return here.recv()
    except EOFError:
        child.join()
        return ChildEnded(f"its process ended with code {child.exitcode} (-9: killed, mostly for want of memory)")
    finally:
        here.close()
        child.join()

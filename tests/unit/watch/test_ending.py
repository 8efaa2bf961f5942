"""A process ends at its time, whatever its threads wait for, and prints why once a host."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import NoReturn

from vlm_pg.watch.watch import Ending


def ends(body: Callable[[], None]) -> tuple[int, str]:
    """Exit code of a process that does ``body`` and then waits for ever, and what it wrote as errors."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _wait_for_ever(body, theirs)
    os.close(theirs)
    with os.fdopen(ours) as errors:
        printed = errors.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed


def _wait_for_ever(body: Callable[[], None], errors: int) -> NoReturn:
    try:
        os.dup2(errors, 2)
        os.close(errors)
        body()
        while True:
            time.sleep(600)
    finally:
        os._exit(99)


def test_a_process_ends_at_its_time_and_prints_why() -> None:
    name = uuid.uuid4().hex
    assert ends(lambda: Ending(name).within(0.05, 7, "the reason")) == (7, "vlm-pg: error: the reason\n")


def test_what_is_set_later_counts() -> None:
    def body() -> None:
        ending = Ending(uuid.uuid4().hex)
        ending.within(600, 7, "the first")
        ending.within(0.05, 8)

    assert ends(body) == (8, "")


def test_one_process_of_a_host_prints_it() -> None:
    name = uuid.uuid4().hex

    def print_it() -> None:
        ending = Ending(name)
        ending.print_once("twice")
        ending.print_once("twice")
        Ending("another").within(0.05, 1)

    mine = Ending(name)
    mine.print_once("once")
    assert ends(print_it) == (1, "")
    del mine
    assert ends(print_it) == (1, "vlm-pg: error: twice\n")  # the process that held the name has ended


def test_unread_output_does_not_delay_it() -> None:
    def body() -> None:
        _, full = os.pipe()
        sys.stdout = os.fdopen(full, "w")
        threading.Thread(target=lambda: sys.stdout.write("x" * 2**22), daemon=True).start()
        Ending(uuid.uuid4().hex).within(0.05, 9)

    assert ends(body) == (9, "")

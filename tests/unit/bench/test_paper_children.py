"""Work in processes of its own: one that is killed is named, and the others go on."""

from __future__ import annotations

import os
import signal

from vlm_pg.bench.paper.children import ChildEnded, in_children


def _work(item: int) -> int:
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * item


def test_one_that_is_killed_does_not_stop_the_others() -> None:
    found = dict(in_children(_work, [1, 2, 3, 4], 2))
    ended = found.pop(2)
    assert isinstance(ended, ChildEnded) and "-9" in str(ended)
    assert found == {1: 10, 3: 30, 4: 40}

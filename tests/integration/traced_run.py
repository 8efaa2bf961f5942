"""``vlm-pg train`` whose phases can be followed from outside: python -m tests.integration.traced_run FILE CONFIG
...

FILE gets a line whenever that changes: the time, and the phase, of a checkpoint also the part of the save.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from vlm_pg import cli
from vlm_pg.training import checkpoints
from vlm_pg.watch.watch import RankWatch


def main(file: str, *arguments: str) -> int:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    within: list[str] = ["before setup"]

    def trace() -> None:
        os.write(descriptor, f"{time.time():.6f} {within[-1]}\n".encode())

    def around(owner: Any, name: str, before: Callable[[Any], Any], after: Callable[[], Any]) -> None:
        original = getattr(owner, name)

        def traced(*given: Any) -> Any:
            before(given)
            trace()
            try:
                return original(*given)
            finally:
                after()
                trace()

        setattr(owner, name, traced)

    def between() -> None:
        within.pop()
        within[-1] = within[-1] if len(within) > 1 else "between phases"

    def inside(name: str) -> None:
        around(checkpoints, name, lambda given: within.append(f"checkpoint, {name}"), within.pop)

    trace()
    around(RankWatch, "begun", lambda given: within.append(given[1]), lambda: None)
    around(RankWatch, "ended", lambda given: None, between)
    inside("commit")
    inside("prune")
    return cli.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

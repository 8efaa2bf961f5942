"""Both kinds of pools behind one face: processes that decode (forked, pickles) and that check (fresh, JSON)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlm_pg.answers.pool import Call, CheckerPool
from vlm_pg.killable.pool import Pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.processes import resolve
from vlm_pg.rewards.settings import CheckerSettings

KINDS = ("decoding", "checking")
MEMORY_MB = 256


class AnyPool:
    """``run`` takes (name, arguments) of tasks and gives what became of each: its value or, as an error, in words."""

    def __init__(self, kind: str, workers: int = 1, deadline_seconds: float = 600.0, preload: Sequence[str] = ()):
        self.decodes = kind == "decoding"
        if self.decodes:
            self.pool: Any = WorkerPool(workers, deadline_seconds, preload, memory_bytes=MEMORY_MB << 20)
        else:
            settings = CheckerSettings(workers=workers, timeout_seconds=deadline_seconds, memory_mb=MEMORY_MB)
            self.pool = CheckerPool(settings, [Call(f"{module}:main") for module in preload])

    def run(self, *tasks: tuple[Any, ...]) -> list[Any]:
        if not self.decodes:
            outcomes = self.pool.run([Call(name, arguments) for name, *arguments in tasks])
            return [RuntimeError(one.problem) if one.problem else one.value for one in outcomes]
        calls = [self.pool.submit(resolve(name), *arguments, label=f"'{name}'") for name, *arguments in tasks]
        return [call.exception() or call.result() for call in calls]

    @property
    def inner(self) -> Pool:
        return self.pool._pool

    def __enter__(self) -> AnyPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: Sequence[int]) -> bool:
    for _ in range(600):
        if all(is_gone(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def others_in_group(pid: int) -> list[int]:
    """Processes of the group that ``pid`` leads, itself left out."""
    others = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if stat.read_text().rsplit(")", 1)[1].split()[2] == str(pid) != stat.parent.name:
                others.append(int(stat.parent.name))
    return others

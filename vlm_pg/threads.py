"""Number of torch threads, and whether they get the cores they need."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_TASKS = Path("/proc/self/task")
# Above this share of waiting, threads that synchronize at every operation make a step several times slower.
WAITING_SHARE = 0.25


def use_threads(wanted: int | None) -> None:
    """Set torch's number of threads.

    The default is torch's own, one per core, but no more than the container's limit, because further threads only
    wait for each other. ``OMP_NUM_THREADS`` takes precedence over that limit.
    """
    import torch

    if wanted is None and "OMP_NUM_THREADS" not in os.environ:
        allowed = allowed_cores()
        if allowed is not None and allowed < torch.get_num_threads():
            wanted = max(1, int(allowed))
    if wanted is not None:
        torch.set_num_threads(wanted)


def usable_cores() -> int:
    """Processor cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_cores(folder: Path = _CGROUP) -> float | None:
    """Limit of this process's control group, in cores (Linux, versions 1 and 2); None: no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / "cpu" / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
        except OSError:
            return None
    if not quota.strip().isdigit():  # "max", or -1
        return None
    return int(quota) / int(period)


class CoreWatch:
    """Measures the share of time in which this process's threads were ready to run and waited for a core."""

    def __init__(self) -> None:
        self._before = _seconds()

    def waiting_share(self) -> float | None:
        """Since the last call; None without Linux's ``schedstat``."""
        before, self._before = self._before, _seconds()
        since = [
            (ran - before.get(thread, (0, 0))[0], waited - before.get(thread, (0, 0))[1])
            for thread, (ran, waited) in self._before.items()
        ]
        total = sum(ran + waited for ran, waited in since)
        return sum(waited for _, waited in since) / total if total else None


def waiting_warning(share: float | None, threads: int) -> str | None:
    """A warning about a step in which threads waited; None if that is negligible, or cannot be changed."""
    if share is None or share < WAITING_SHARE or threads == 1:
        return None
    return (
        f"this process waited for a processor core {100 * share:.0f} % of its time, because other programs or ranks "
        f"use them. torch's {threads} threads wait for each other at every operation, which can make a step several "
        f"times slower; fewer are faster then. Set training.torch_threads to 1, or to the cores that are free. (Said "
        "once.)"
    )


def _seconds() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread ran, and waited for a core (sched-stats in the kernel's documentation)."""
    found: dict[str, tuple[int, int]] = {}
    for file in _TASKS.glob("*/schedstat"):
        try:
            ran, waited, _ = file.read_text().split()
        except (OSError, ValueError):  # the thread has ended
            continue
        found[file.parent.name] = int(ran), int(waited)
    return found

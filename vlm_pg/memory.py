"""Sizes of memory and tensors; usable without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Total size of their values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def host_bytes() -> int:
    """The machine's memory, free or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_bytes(device: torch.device) -> int | None:
    """All memory of a GPU, free or not; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.mem_get_info(device)[1])


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; a CPU's is shared by the processes of this machine."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved and does not use is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def free_host_bytes() -> int:
    """Memory that this process's container can still take. Raises OSError: not on Linux."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        # The page cache is reclaimable.
        stat = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        used -= int(stat[stat.index("inactive_file") + 1])
    except (OSError, ValueError):  # no cgroup, or "max"
        return free
    return min(free, max(0, limit - used))

"""How much memory a decoding process may take: a limit of the kernel, so that no decoder can talk its way around it."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(extra_bytes: int) -> None:
    """From now on this process gets ``extra_bytes`` more memory of its own than it holds now.

    What is beyond fails as an allocation that returns nothing, which Python and FFmpeg report as an error. Counted is
    private writable memory (Linux's RLIMIT_DATA): mapped libraries, of which torch brings gigabytes, are not.
    """
    held_kib = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")
    )
    limit = held_kib * 1024 + extra_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

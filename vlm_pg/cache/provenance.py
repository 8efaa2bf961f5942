"""What a cache key depends on besides its inputs: the machine that computes, and the source code it runs."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_GPUS = Path("/proc/driver/nvidia/gpus")


def gpu_driver() -> list[str]:
    """The version of the GPUs' driver; where it is not said, this machine."""
    return [line for file in _DRIVERS for line in lines(file)] or [this_machine()]


def gpu_models() -> list[str]:
    """Models of the GPUs here, as NVIDIA's driver tells processes that have not started CUDA; none: unknown."""
    found = (line for file in _GPUS.glob("*/information") for line in lines(file) if line.startswith("Model:"))
    return sorted({line.partition(":")[2].strip() for line in found})


@cache
def this_machine() -> str:
    """Equal to no other machine's, and the same as long as it runs.

    With the kernel's own number of this start, where there is one: names and network addresses of containers are alike.
    """
    return " ".join([*os.uname(), *(lines(_BOOT_ID) or [f"{uuid.getnode():x}"])])


def lines(file: Path) -> list[str]:
    """Of a file of the system; none where there is no such file."""
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def source_digest(files: Iterable[Path]) -> str:
    """SHA-256 of source files and their names, in whatever order they come and wherever they lie.

    A comment is a change too: entries are then made again, which costs time and no run its bits.

    Raises:
        OSError: one cannot be read, so that nobody knows what runs here.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()

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
    """The version of the GPUs' driver; where it is unknown, this machine."""
    return [line for file in _DRIVERS for line in lines(file)] or [this_machine()]


def gpu_models() -> list[str]:
    """Models of the GPUs here, from NVIDIA's driver without starting CUDA; none: unknown."""
    found = (line for file in _GPUS.glob("*/information") for line in lines(file) if line.startswith("Model:"))
    return sorted({line.partition(":")[2].strip() for line in found})


@cache
def this_machine() -> str:
    """A unique text, constant while the machine runs: with the kernel's boot id where there is one, because names and
    network addresses of containers repeat."""
    return " ".join([*os.uname(), *(lines(_BOOT_ID) or [f"{uuid.getnode():x}"])])


def lines(file: Path) -> list[str]:
    """The lines of a system file; none where it does not exist."""
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def source_digest(files: Iterable[Path]) -> str:
    """SHA-256 of source files and their names, whatever their order and folders.

    A changed comment counts too: entries are then made again, which costs time but changes no result.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()

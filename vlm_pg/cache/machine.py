"""What a machine says of itself. What it does not say must not make two machines look alike."""

from __future__ import annotations

import os
import uuid
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

"""What the check runs on: processor, GPU and driver, packages, commit. Nothing here imports torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_pg.gpu_check.packages import installed
from vlm_pg.memory import GIB, host_bytes
from vlm_pg.threads import usable_cores

REPOSITORY = Path(__file__).parents[2]
_ASKED = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory")


def describe(python_path: Sequence[str]) -> dict[str, Any]:
    """Machine, driver, versions of all packages and commit.

    Args:
        python_path: folders of packages that the check was given.
    """
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": usable_cores(),
        "memory_gib": round(host_bytes() / GIB, 1),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / GIB, 1),
        "python": f"{platform.python_version()} at {sys.executable}",
        "python_path": list(python_path),
        "gpus": gpus(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "commit": commit(),
        "packages": installed(),
    }


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; none where there is no nvidia-smi, or it fails."""
    lines = _said("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader")
    return [dict(zip(_ASKED, [part.strip() for part in line.split(",")])) for line in lines]


def torch_sees_gpu(python_path: Sequence[str]) -> bool:
    """For machines without nvidia-smi; asked of a process of its own, so that this one holds nothing of the GPU."""
    code = "import torch; print(torch.cuda.is_available())"
    path = os.pathsep.join([*python_path, os.environ.get("PYTHONPATH", "")])
    return _said(sys.executable, "-c", code, PYTHONPATH=path)[-1:] == ["True"]


def commit() -> str | None:
    """Of the checkout that this package lies in, "+changes" where files differ from it; None outside of git."""
    git = ("git", "-C", str(REPOSITORY))
    name = _said(*git, "rev-parse", "HEAD")
    if not name:
        return None
    return name[0] + ("+changes" if _said(*git, "status", "--porcelain", "--untracked-files=no") else "")


def _said(*command: str, **environment: str) -> list[str]:
    """Lines that a command prints; none where it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []

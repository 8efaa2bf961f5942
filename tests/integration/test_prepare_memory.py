"""Preparing many clips takes no more memory than a tenth of them, in no process.

``pytest -m matrix -s tests/integration/test_prepare_memory.py`` prints the peaks of ten thousand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.prepared_media import command, write_set
from tests.support.processes import ONE_THREAD_NO_GPU, ROOT

pytestmark = pytest.mark.matrix


def private_mib(pid: int) -> float:
    """Resident memory that is a process's own, 0 of one that has ended: how much of libraries is resident is chance."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in children for one in (int(child), *below(int(child)))]


def peaks(folder: Path, clips: int) -> tuple[float, float]:
    """MiB of the command's own process, and of the largest one below it."""
    write_set(folder / f"{clips}", clips)
    arguments = command(folder / f"{clips}", folder / f"{clips}" / "out", 2)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), **ONE_THREAD_NO_GPU)
    main = other = 0.0
    with subprocess.Popen([sys.executable, "-m", "vlm_pg.cli", *arguments], env=environment, cwd=ROOT) as process:
        while process.poll() is None:
            main = max(main, private_mib(process.pid))
            other = max([other, *map(private_mib, below(process.pid))])
            time.sleep(0.05)
    assert process.returncode == 0
    return main, other


@pytest.mark.parametrize("clips", [10_000, 600])
def test_memory_does_not_grow_with_the_clips(tmp_path: Path, clips: int) -> None:
    tenth, whole = peaks(tmp_path, clips // 10), peaks(tmp_path, clips)
    print(f"{clips:,} clips: {whole[0]:.0f} and {whole[1]:.0f} MiB, a tenth: {tenth[0]:.0f} and {tenth[1]:.0f} MiB")
    # The frames of 540 clips that stayed would be more: of each 16 take at least 150 KiB.
    assert all(now < 1.1 * before for now, before in zip(whole, tenth, strict=True))

"""``torchrun --max-restarts``: restarted ranks meet in a store that still has the entries of those before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ONE_THREAD_NO_GPU, ROOT, launch_ranks
from vlm_pg.distributed.processes import COLLECTIVE_TIMEOUT

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_nothing_is_left_of_the_ranks_before(engine: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += [f"--master-port={port}", "--module", "tests.integration.restarted_rank", engine]
    done = subprocess.run(
        [*command, str(tmp_path / "found")],
        cwd=ROOT,
        env=os.environ | ONE_THREAD_NO_GPU | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "found").read_text() == "[(0, False, False), (1, False, False)]"


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_ranks_wait_for_hours(engine: str) -> None:
    """For one that still samples or writes: in groups that DeepSpeed makes, too, and at the store for NCCL's ids."""
    assert launch_ranks("tests.integration.waiting_ranks", engine).splitlines()[-1] == str(COLLECTIVE_TIMEOUT)

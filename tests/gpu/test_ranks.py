"""On two real GPUs: NCCL's groups wait as long as gloo's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT
from vlm_pg.distributed.processes import COLLECTIVE_TIMEOUT

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_ranks_wait_for_hours(engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--module", "tests.integration.waiting_ranks", engine]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines().count(str(COLLECTIVE_TIMEOUT)) == 2
    assert "using the device under current context" not in done.stderr  # of barriers: each names its own

"""Our start of torchrun: nodes do not wait minutes for the launcher of another one; restarted ranks meet in a store
that still has the entries of those before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from tests.support.processes import ONE_THREAD_NO_GPU, ROOT, launch_ranks
from vlm_pg.distributed import torchrun
from vlm_pg.distributed.processes import COLLECTIVE_TIMEOUT

pytestmark = pytest.mark.matrix

QUICK = "from vlm_pg.distributed import torchrun; torchrun.EXIT_BARRIER_SECONDS = 0.1; torchrun.main()"
# The first node's rank is done at once, the other one's when the test is.
RANK = ["bash", "-c", "[ $GROUP_RANK = 0 ] || exec sleep 600"]


@pytest.fixture
def nodes() -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--no-python"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", QUICK, *options, f"--node-rank={node}", *RANK],
            cwd=ROOT,
            env=os.environ | ONE_THREAD_NO_GPU | {"PYTHONPATH": str(ROOT)},
            text=True,
            stderr=subprocess.PIPE,
        )
        for node in (0, 1)
    ]
    yield running
    for node in running:
        node.terminate()
    for node in running:
        node.communicate()


def test_a_node_that_is_done_waits_seconds_for_the_others(nodes: list[subprocess.Popen[str]]) -> None:
    printed = nodes[0].communicate(timeout=120)[1]
    assert nodes[0].returncode == 0 and "Error waiting on exit barrier" in printed, printed
    assert nodes[1].poll() is None


def test_the_wait_is_handed_to_torchs_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Mock()
    monkeypatch.setattr(api, "LocalElasticAgent", agent)
    monkeypatch.setattr(run, "main", lambda: vars(api)["LocalElasticAgent"]("of a node"))
    torchrun.main()
    agent.assert_called_once_with("of a node", exit_barrier_timeout=torchrun.EXIT_BARRIER_SECONDS)
    assert "exit_barrier_timeout" in signature(LocalElasticAgent).parameters


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

"""Two hosts (network namespaces) and a plug that is pulled: nothing more comes from the other side, no end either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_dying_ranks import GONE_SECONDS, LOSS
from tests.support.processes import ONE_THREAD_NO_GPU, ROOT
from tests.support.small_run import small_run
from vlm_pg.errors import EXIT_RANK_LOST

pytestmark = pytest.mark.matrix

HOSTS = (f"vpg{os.getpid()}a", f"vpg{os.getpid()}b")
ADDRESSES = ("10.211.7.1", "10.211.7.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """Between the two hosts; their ends have the hosts' names."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", HOSTS[0], "type", "veth", "peer", "name", HOSTS[1])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        for host, address in zip(HOSTS, ADDRESSES):
            ip("link", "set", host, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", host)
            ip("-n", host, "link", "set", host, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "del", host)


def start(rank: int, *of_run: str) -> subprocess.Popen[str]:
    variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29500}
    environment = dict(os.environ) | ONE_THREAD_NO_GPU | {name: str(value) for name, value in variables.items()}
    environment |= {"GLOO_SOCKET_IFNAME": HOSTS[rank], f"LOSS_OF_RANK_{rank}": "hangs"}
    command = ["ip", "netns", "exec", HOSTS[rank], sys.executable, "-m", "vlm_pg.cli", "train", *of_run]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_a_host_that_vanishes_is_named(cable: None, tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text(LOSS)
    of_run = [str(small_run(tmp_path)), f"run.dir={tmp_path / 'run'}", f"algorithm.loss={odd}:odd", "eval.before=false"]
    ranks = [start(rank, *of_run) for rank in range(2)]
    try:
        end = time.monotonic() + 300
        while not all(Path(f"{odd}.begun-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end and all(rank.poll() is None for rank in ranks)
            time.sleep(0.1)
        ip("-n", HOSTS[1], "link", "set", HOSTS[1], "down")
        pulled_seconds = time.monotonic()
        printed = [rank.communicate(timeout=GONE_SECONDS)[0] for rank in ranks]
        print(f"both gone after {time.monotonic() - pulled_seconds:.1f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [EXIT_RANK_LOST] * 2, printed
    for rank in range(2):
        assert f"vlm-pg: error: rank {1 - rank} (host " in printed[rank], printed[rank]
        assert 'has gone in phase "train", before the first step was completed' in printed[rank], printed[rank]

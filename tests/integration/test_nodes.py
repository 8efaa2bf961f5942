"""The files for several nodes, run as two nodes of one process each: they train what two processes train, and one
node's death ends the other, which names it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from tests.support.nodes import Nodes, host_name, make_checkout
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, read_lines
from tests.support.short_run import short_run
from vlm_pg.training.checkpoints import find_checkpoints

STEPS = 60
ENGINES = {
    "torch": ["training.engine=torch"],
    "zero2": ["training.engine=deepspeed", f"training.deepspeed_config={ROOT}/configs/deepspeed/zero2.json"],
}
WAYS = {"torchrun": "torch", "hostfile": "zero2", "hostfile without ssh": "zero2", "slurm": "torch"}
# The requirement itself; it takes a few seconds.
GONE_SECONDS = 60


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("nodes"), training={"steps": STEPS, "checkpoint_every": 4})


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Callable[[str], dict[str, Any]]:
    """Weights at the end, by engine, as two processes give them that a test starts itself."""

    @cache
    def weights(engine: str) -> dict[str, Any]:
        run = config.parent / engine
        launch_ranks("vlm_pg.cli", "train", str(config), f"run.dir={run}", *ENGINES[engine])
        return final_weights(run)

    return weights


def final_weights(run: Path) -> dict[str, Any]:
    return load_file(run / f"checkpoints/step-{STEPS:06d}/model.safetensors")


def steps_done(run: Path) -> int:
    return len(read_lines(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.matrix
@pytest.mark.parametrize("died", [1, 0])
@pytest.mark.parametrize("way", WAYS)
def test_a_node_that_dies_ends_the_other_and_the_run_goes_on(
    way: str, died: int, config: Path, undisturbed: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    root, run = make_checkout(tmp_path), tmp_path / "run"
    arguments = [str(config), f"run.dir={run}", "run.resume=auto", *ENGINES[WAYS[way]]]
    nodes = Nodes(root, way, *arguments)
    try:
        nodes.wait_for(lambda: steps_done(run) >= 6)
        everything = nodes.processes()
        nodes.die(died)
        nodes.wait_for(lambda: None not in nodes.returncodes, GONE_SECONDS)
        assert not psutil.wait_procs(everything, timeout=GONE_SECONDS)[1], nodes.printed
        assert any(nodes.returncodes), nodes.printed
        named = rf"rank {died} \(host {host_name(died)}, process \d+\) .*after step (\d+)"
        found = re.search(named, nodes.printed)
        assert found and 6 <= int(found[1]) <= steps_done(run), nodes.printed
    finally:
        nodes.end()
    assert steps_done(run) < STEPS
    # By the same two processes however they are started: what starts them is tested below.
    assert "resuming after step" in launch_ranks("vlm_pg.cli", "train", *arguments)
    weights = final_weights(run)
    assert all(weights[name].equal(weight) for name, weight in undisturbed(WAYS[way]).items())


@pytest.mark.matrix
@pytest.mark.parametrize("way", [pytest.param("hostfile", marks=pytest.mark.matrix), "slurm"])
def test_nodes_train_together(way: str, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    nodes = Nodes(make_checkout(tmp_path), way, str(config), f"run.dir={run}", "training.steps=2", *ENGINES[WAYS[way]])
    try:
        nodes.wait_for(lambda: None not in nodes.returncodes)
        assert nodes.returncodes == [0] and "2 process(es), engine" in nodes.printed, nodes.printed
        assert steps_done(run) == 2
    finally:
        nodes.end()


@pytest.mark.matrix
def test_a_stop_request_of_one_node_stops_both(config: Path, tmp_path: Path) -> None:
    """Torchrun hands SIGUSR1 on, and does not die of it."""
    root, run = make_checkout(tmp_path), tmp_path / "run"
    nodes = Nodes(root, "torchrun", str(config), f"run.dir={run}", *ENGINES["torch"])
    try:
        nodes.wait_for(lambda: steps_done(run) >= 2)
        nodes.signal(1, signal.SIGUSR1)
        nodes.wait_for(lambda: "stopped on request after step" in nodes.printed)
        nodes.wait_for(lambda: bool(find_checkpoints(run / "checkpoints")))
        assert find_checkpoints(run / "checkpoints")[-1][0] == steps_done(run) < STEPS
    finally:
        nodes.end()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "way, node, number",
    [
        ("torchrun", 1, signal.SIGTERM),
        ("torchrun", 1, signal.SIGKILL),
        ("torchrun", 0, signal.SIGKILL),
        ("hostfile without ssh", 1, signal.SIGKILL),
    ],
)
def test_a_launcher_that_is_ended_stops_both_nodes(
    way: str, node: int, number: signal.Signals, config: Path, tmp_path: Path
) -> None:
    """By SIGKILL it cannot tell its ranks, which notice, and no launcher waits for one that is gone for minutes."""
    root, run = make_checkout(tmp_path), tmp_path / "run"
    nodes = Nodes(root, way, str(config), f"run.dir={run}", *ENGINES[WAYS[way]])
    try:
        nodes.wait_for(lambda: steps_done(run) >= 2)
        everything = nodes.processes()
        nodes.signal(node, number)
        assert not psutil.wait_procs(everything, timeout=GONE_SECONDS)[1], nodes.printed
        assert nodes.returncodes[1 - node] == 0, nodes.printed
        assert "stopped on request after step" in nodes.printed
        noticed = rf"vlm-pg: warning: {way.split()[0]} \(host {host_name(node)}, process \d+\) has ended without"
        noticed = noticed.replace("hostfile", "deepspeed")
        assert len(re.findall(noticed, nodes.printed)) == (number == signal.SIGKILL), nodes.printed
        assert find_checkpoints(run / "checkpoints")[-1][0] == steps_done(run) < STEPS
    finally:
        nodes.end()

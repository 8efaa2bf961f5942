"""Two ranks, one of which is asked to stop at any moment: both end well, the last completed step is saved, and the run
goes on from it as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.integration.test_deepspeed import deepspeed_config
from tests.integration.test_sequence_runs import sections
from tests.support.processes import launch_ranks, start_ranks
from tests.support.runs import ROOT, read_lines, write_config
from vlm_pg.training.checkpoints import find_checkpoints

STEPS = 12
# Of a run that is stopped once and no more.
FEW_STEPS = 6
# And for how many seconds of a run of all steps a moment is drawn: about as long as they take.
ENGINES = {"torch": 2.5, "zero3 in turns": 12.0, "sequence": 3.0, "parts": 4.0}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopping")
    prepare_embedded(["--out", str(path / "clips"), "--train", "24", "--eval", "8"])
    values = sections(path, ROOT / "assets/tiny-qwen2_5-vl")
    values["training"] |= {"steps": STEPS, "prompts_per_step": 4, "checkpoint_every": 0}
    values["model"]["train"] = ["language"]
    write_config(path / "run.yaml", values)
    return path


def options(folder: Path, engine: str) -> list[str]:
    if engine == "torch":
        return ["algorithm.num_iterations=2"]
    if engine == "sequence":
        return ["training.sequence_parallel=2"]
    if engine == "parts":
        return ["training.sequence_parallel=2", "rollout.divide_prefix=always"]
    file = deepspeed_config(folder, 3)
    return ["training.engine=deepspeed", f"training.deepspeed_config={file}", "rollout.gather=layers"]


def arguments(folder: Path, run: Path, engine: str, steps: int) -> list[str]:
    of_run = [str(folder / "run.yaml"), f"run.dir={run}", f"training.steps={steps}", *options(folder, engine)]
    return ["vlm_pg.cli", "train", *of_run]


def stopped_somewhere(folder: Path, run: Path, engine: str, seed: int, steps: int, expected: dict[str, Any]) -> None:
    chance = random.Random(f"{engine}/{seed}")
    ranks = start_ranks(*arguments(folder, run, engine, steps))
    deadline = time.monotonic() + 120
    while not (run / "config.yaml").exists():
        assert time.monotonic() < deadline and all(rank.returncode is None for rank in ranks)
        time.sleep(0.01)
    time.sleep(chance.uniform(0, ENGINES[engine] * steps / STEPS))
    ranks[chance.randrange(2)].signal(chance.choice(SIGNALS))
    done = [rank.finish(timeout_seconds=60) for rank in ranks]
    said = "".join(one.stdout + one.stderr for one in done)
    metrics = run / "metrics.jsonl"
    completed = [line["step"] for line in read_lines(metrics)] if metrics.exists() else []
    # A process that has done all and is on its way out no longer listens.
    well = {0, -SIGNALS[0], -SIGNALS[1]} if len(completed) == steps else {0}
    assert {one.returncode for one in done} <= well, said
    saved = find_checkpoints(run / "checkpoints")
    if saved or completed:
        assert [step for step, _ in saved] == [max(completed, default=0)], said
    print(engine, seed, "stopped after step", max(completed, default=0))
    launch_ranks(*arguments(folder, run, engine, steps), "run.resume=auto")
    found = load_file(run / f"checkpoints/step-{steps:06d}/model.safetensors")
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, steps + 1))


@pytest.mark.parametrize("moments", [pytest.param(10, marks=pytest.mark.matrix), 1])
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.matrix if name == "parts" else ()) for name in ENGINES]
)
def test_ranks_stop_together_at_any_moment(engine: str, moments: int, folder: Path) -> None:
    whole, steps = folder / f"{engine}-whole-{moments}", FEW_STEPS if moments == 1 else STEPS
    launch_ranks(*arguments(folder, whole, engine, steps))
    expected = load_file(whole / f"checkpoints/step-{steps:06d}/model.safetensors")
    for seed in range(moments):
        stopped_somewhere(folder, folder / f"{engine}-{moments}-{seed}", engine, seed, steps, expected)

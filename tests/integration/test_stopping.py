"""Two ranks, one of which gets a stop request at any moment: both end well, the last completed step is saved, and the
run goes on from it as if it had not been interrupted."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.processes import launch_ranks, start_ranks
from tests.support.runs import deepspeed_config, read_lines
from tests.support.small_run import clips_run
from vlm_pg.training.checkpoints import find_checkpoints

STEPS = 12
# Of a run that is stopped once.
FEW_STEPS = 6
# Seconds of a run of all steps, within which a moment is drawn.
ENGINES = {"torch": 2.5, "sequence": 3.0, "zero3 in lockstep": 12.0, "parts": 4.0}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopping")
    training = {"prompts_per_step": 4, "micro_batch_tokens": 150, "checkpoint_every": 0}
    clips_run(path, model={"train": ["language"]}, rollout={"num_generations": 5}, training=training)
    return path


def arguments(folder: Path, run: Path, engine: str, steps: int) -> list[str]:
    options = {
        "torch": ["algorithm.num_iterations=2"],
        "sequence": ["training.sequence_parallel=2"],
        "parts": ["training.sequence_parallel=2", "rollout.divide_prefix=always"],
    }
    if engine not in options:
        file = deepspeed_config(folder, 3)
        options[engine] = ["training.engine=deepspeed", f"training.deepspeed_config={file}", "rollout.gather=layers"]
    of_run = [f"run.dir={run}", f"training.steps={steps}", "run.resume=auto", *options[engine]]
    return ["vlm_pg.cli", "train", str(folder / "run.yaml"), *of_run]


def stop_and_resume(folder: Path, run: Path, engine: str, seed: int, steps: int, expected: dict[str, Any]) -> None:
    chance = random.Random(f"{engine}/{seed}")
    ranks = start_ranks(*arguments(folder, run, engine, steps))
    deadline = time.monotonic() + 120
    while not (run / "config.yaml").exists():
        assert time.monotonic() < deadline and all(rank.returncode is None for rank in ranks)
        time.sleep(0.01)
    time.sleep(chance.uniform(0, ENGINES[engine] * steps / STEPS))
    ranks[chance.randrange(2)].signal(chance.choice(SIGNALS))
    done = [rank.finish(timeout_seconds=60) for rank in ranks]
    printed = "".join(one.stdout + one.stderr for one in done)
    metrics = run / "metrics.jsonl"
    completed = [line["step"] for line in read_lines(metrics)] if metrics.exists() else []
    # A process that has done all and is on its way out no longer listens.
    allowed = {0, -SIGNALS[0], -SIGNALS[1]} if len(completed) == steps else {0}
    assert {one.returncode for one in done} <= allowed, printed
    saved = find_checkpoints(run / "checkpoints")
    if saved or completed:
        assert [step for step, _ in saved] == [max(completed, default=0)], printed
    launch_ranks(*arguments(folder, run, engine, steps))
    found = load_file(run / f"checkpoints/step-{steps:06d}/model.safetensors")
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, steps + 1))


@pytest.mark.parametrize("moments", [pytest.param(10, marks=pytest.mark.matrix), 1])
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.matrix] * (name != "torch")) for name in ENGINES]
)
def test_ranks_stop_together_at_any_moment(engine: str, moments: int, folder: Path) -> None:
    whole, steps = folder / f"{engine}-whole-{moments}", FEW_STEPS if moments == 1 else STEPS
    launch_ranks(*arguments(folder, whole, engine, steps))
    expected = load_file(whole / f"checkpoints/step-{steps:06d}/model.safetensors")
    for seed in range(moments):
        stop_and_resume(folder, folder / f"{engine}-{moments}-{seed}", engine, seed, steps, expected)

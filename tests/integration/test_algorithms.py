"""Whole runs of every preset; their questions and rollouts depend on neither resuming nor the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, read_lines
from tests.support.short_run import short_run
from vlm_pg.algorithms.registry import PRESETS
from vlm_pg.config import load_config
from vlm_pg.training.main import train

QUIET = ["observe.trackers=[]", "observe.report=false", "media.workers=0", "eval.before=false", "eval.after=false"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few clips of the embedded default."""
    path = tmp_path_factory.mktemp("clips")
    prepare_embedded(["--out", str(path), "--train", "160", "--eval", "8"])
    return path


# Of resampling, pruning, control groups and sequence ratios; the others differ by losses and estimators alone.
SOME = ("dapo", "cppo", "t_grpo", "gspo")


@pytest.mark.parametrize(
    "preset", [pytest.param(preset, marks=[pytest.mark.matrix] * (preset not in SOME)) for preset in PRESETS]
)
def test_a_preset_trains_through_its_own_file(preset: str, clips: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = [f"data.train={clips}/train.jsonl", f"run.dir={run}", "training.steps=1"]
    config = load_config(ROOT / "configs" / "algorithms" / f"{preset}.yaml", [*own, *QUIET])
    assert config.algorithm.preset == preset
    assert train(config) == 0
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1]
    assert all(line["grad_norm"] > 0 and line["updates"] == config.algorithm.updates for line in lines)
    algorithm = config.algorithm
    assert all((line["pruned_share"] > 0) == (algorithm.prune_rate > 0) for line in lines)
    assert all(("resampled_groups" in line) == (algorithm.resample_rounds > 0) for line in lines)
    assert all(("kl" in line) == (algorithm.kl_coef > 0) for line in lines)
    assert all(("reward/temporal" in line) == (algorithm.temporal_bonus > 0) for line in lines)


SPREAD = '''
def spread(response, question):
    """Half of the questions have no spread; the others' rewards depend on the text."""
    return 0.5 if len(question) % 2 else sum(map(ord, response)) % 7 / 7


def broken(response):
    raise KeyError("no such thing")
'''


def spread_run(folder: Path, algorithm: dict[str, Any], **training: Any) -> Path:
    """A run on text questions that a random model answers, with a reward that differs by text."""
    training = {"steps": 4, "prompts_per_step": 6, "checkpoint_every": 100, **training}
    config = short_run(
        folder,
        algorithm=algorithm,
        rollout={"num_generations": 8, "max_new_tokens": 8},
        training=training,
        observe={"rollouts_per_step": 99},
    )
    (folder / "spread.py").write_text(SPREAD)
    records = json.loads((folder / "records.json").read_text())
    numbers = [7 ** (index % 4) for index in range(40)]
    records = [
        records[0]
        | {
            "problem_id": index,
            "problem": f"How much is {number} + {index}?",
            "solution": f"<answer>{number + index}</answer>",
        }
        for index, number in enumerate(numbers)
    ]
    (folder / "records.json").write_text(json.dumps(records))
    return config


RESAMPLING = {"resample_rounds": 2, "prune_rate": 0.5, "num_iterations": 2}


def sampled(run: Path) -> set[tuple[Any, ...]]:
    return {(r["step"], r["sample_id"], r["response"]) for r in read_lines(run / "rollouts.jsonl")}


@pytest.mark.matrix
def test_a_resumed_run_goes_on_with_the_same_questions(tmp_path: Path) -> None:
    """A step's number of questions depends on its rollouts, so the position in the order is part of a checkpoint."""
    config = spread_run(tmp_path, RESAMPLING)
    assert train(load_config(config, [f"run.dir={tmp_path}/whole"])) == 0
    assert train(load_config(config, [f"run.dir={tmp_path}/cut", "training.steps=2"])) == 0
    assert train(load_config(config, [f"run.dir={tmp_path}/cut"])) == 0
    assert sampled(tmp_path / "cut") == sampled(tmp_path / "whole")
    weights, expected = (
        load_file(tmp_path / run / "checkpoints/step-000004/model.safetensors") for run in ("cut", "whole")
    )
    assert all((weights[name] == tensor).all() for name, tensor in expected.items())
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert any(line["resampled_groups"] > 0 for line in lines) and any(line["filled_groups"] > 0 for line in lines)


def test_a_function_that_fails_is_shown_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = spread_run(tmp_path, {}, steps=2)
    own = f"{{function: '{tmp_path}/spread.py:spread'}}, {{function: '{tmp_path}/spread.py:broken', weight: 0}}"
    assert train(load_config(config, [f"run.dir={tmp_path}/run", f"reward.functions=[{own}]"])) == 0
    printed = capsys.readouterr().out
    assert printed.count("KeyError: 'no such thing'") == 1 and "The reward function 'broken'" in printed
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["reward_errors/broken"] for line in lines] == [48.0, 96.0]
    assert all(line["reward"] is not None and line["reward/broken"] is None for line in lines)


@pytest.mark.matrix
def test_two_ranks_sample_the_questions_of_one_process(tmp_path: Path) -> None:
    config = spread_run(tmp_path, RESAMPLING, steps=1)
    launch_ranks("vlm_pg.cli", "train", str(config), f"run.dir={tmp_path}/two")
    assert train(load_config(config, [f"run.dir={tmp_path}/one"])) == 0
    two, one = (read_lines(tmp_path / run / "metrics.jsonl")[0] for run in ("two", "one"))
    for name in ("questions", "resampled_groups", "unfilled_groups", "filled_groups", "kept_tokens", "token_budget"):
        assert two[name] == one[name], name
    for name in ("reward", "reward_std", "pruned_share", "loss", "response_tokens"):
        assert two[name] == pytest.approx(one[name], abs=1e-5), name
    assert two["filled_groups"] > 0

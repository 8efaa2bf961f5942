"""Whole runs on sequence ranks, or balanced over data ranks, train the weights of one process.

Questions, rollouts and rewards differ from rank to rank, metrics count each group once, and checkpoints are those of
any other run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.layouts import distance
from tests.support.processes import launch_ranks
from tests.support.runs import deepspeed_config, read_lines
from tests.support.short_run import train_here
from tests.support.small_run import clips_run

TOLERANCE = 1e-5
FROZEN = ["model.train=[language]"]
SEVERAL_UPDATES = ["algorithm.minibatches=2", "algorithm.num_iterations=2", "rollout.logprobs=recompute"]
CHUNKS = ["training.micro_batch_tokens=121"]
FEATURES: dict[str, list[str]] = {
    "plain": [],
    "chunks": CHUNKS,
    "kl and entropy": [*FROZEN, "algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.1"],
    "kl, trained tower": ["algorithm.kl_coef=0.1", "model.gradient_checkpointing=true"],
    "token rewards": [*FROZEN, "algorithm.kl_coef=0.1", "algorithm.kl_in=token_reward"],
    # Half of an adapter begins at zero and is nothing but what Adam made of gradients, rounding included.
    "lora": [*FROZEN, "model.lora.rank=4", "algorithm.kl_coef=0.1", "training.adam_epsilon=1e-2"],
    "cppo": [*FROZEN, "algorithm.prune_rate=0.5", "algorithm.prune_fill=true"],
    "several updates": SEVERAL_UPDATES,
    "sequences": ["algorithm.preset=gspo", "algorithm.minibatches=1", "algorithm.num_iterations=2"],
    "resampled": ["algorithm.resample_rounds=2"],
    "nothing shared": ["model.share_prefix=false"],
    "prompts together": FROZEN,
    "prompts in parts": FROZEN,
    "one question": ["training.prompts_per_step=1"],
}
# Settings of sequence ranks alone.
OF_RANKS = {"prompts together": ["rollout.split=prompts"], "prompts in parts": ["rollout.divide_prefix=always"]}
# Sequence ranks sample a single prompt together, whose forward is not recorded.
SAMPLED_TOGETHER = (*OF_RANKS, "one question", "cppo")
DEFAULT = ("prompts in parts", "lora", "several updates")
# Metrics of how the work was done, not of what was computed.
ABOUT_THE_WORK = ("seconds", "step_seconds", "tokens_per_second", "generation/", "core_wait_share")


def sequence_run(folder: Path) -> Path:
    training = {"micro_batch_tokens": 150}
    return clips_run(folder, run={"resume": "auto"}, rollout={"num_generations": 5}, training=training)


def run_all(folder: Path, name: str, runs: Sequence[list[str]], ranks: int) -> list[Path]:
    """Folders of the runs."""
    (folder / name).mkdir()
    (folder / name / "run.yaml").write_bytes((folder / "run.yaml").read_bytes())
    (folder / name / "runs.json").write_text(json.dumps(runs))
    arguments = (str(folder / name), str(folder / name / "runs.json"))
    seconds = 240 + 60 * len(runs)
    launch_ranks("tests.integration.zero_pairs", *arguments, ranks=ranks, timeout_seconds=seconds)
    return [folder / name / f"run-{number}" for number in range(len(runs))]


def assert_same_weights(found: Path, expected: Path, name: str = "") -> None:
    ours, theirs = (
        load_file(next(run.glob("checkpoints/step-00000[23]/*model.safetensors"))) for run in (found, expected)
    )
    far = {weight: apart for weight, apart in distance(ours, theirs).items() if not apart <= TOLERANCE}
    assert not far, (name, far)


@pytest.mark.parametrize(
    "names", [pytest.param(tuple(FEATURES), marks=pytest.mark.matrix, id="all"), pytest.param(DEFAULT, id="some")]
)
def test_runs_on_sequence_ranks_train_what_one_process_trains(names: tuple[str, ...], tmp_path: Path) -> None:
    sequence_run(tmp_path)
    shared = [[*FEATURES[name], *OF_RANKS.get(name, []), "training.sequence_parallel=2"] for name in names]
    one = run_all(tmp_path, "one", [FEATURES[name] for name in names], 1)
    for name, expected, found in zip(names, one, run_all(tmp_path, "two", shared, 2), strict=True):
        assert_same_weights(found, expected, name)
        for of_one, of_two in zip(*(read_lines(run / "metrics.jsonl") for run in (expected, found)), strict=True):
            assert {*of_one, "seconds/idle"} == set(of_two), name
            unlike = (*ABOUT_THE_WORK, *(("tokens_recorded", "mismatch/") if name in SAMPLED_TOGETHER else ()))
            compared = {
                key: value
                for key, value in of_one.items()
                if isinstance(value, float | int) and not key.startswith(unlike)
            }
            assert {key: of_two[key] for key in compared} == pytest.approx(compared, rel=1e-4, abs=1e-6), name


def of_zero3(folder: Path) -> list[str]:
    file = deepspeed_config(folder, 3)
    return [*FROZEN, "training.engine=deepspeed", f"training.deepspeed_config={file}", "rollout.gather=layers"]


@pytest.mark.matrix
def test_sequence_ranks_under_zero_3_train_what_one_process_trains(tmp_path: Path) -> None:
    """Four processes: two data ranks of two; generation in lockstep, frozen tower, weights sharded over all four."""
    config, alone, shared = str(sequence_run(tmp_path)), tmp_path / "alone", tmp_path / "shared"
    ended = train_here(Path(config), *FROZEN, "training.steps=2", f"run.dir={alone}")
    assert ended.code == 0, ended.printed
    own = [*of_zero3(tmp_path), "training.sequence_parallel=2", "training.steps=2", f"run.dir={shared}"]
    launch_ranks("vlm_pg.cli", "train", config, *own, ranks=4)
    assert_same_weights(shared, alone)


@pytest.mark.matrix
def test_ranks_that_gather_weights_in_lockstep_make_equally_many_calls(tmp_path: Path) -> None:
    """Tiles and pieces while one rank has no question, or fewer frames of a video than the other."""
    sequence_run(tmp_path)
    common = [*of_zero3(tmp_path), "training.steps=1"]
    runs = [
        [*common, "training.prompts_per_step=1", "model.mlp_tile_rows=16"],
        [*common, "training.sequence_parallel=2", "model.vision_piece_tokens=1", "media.max_frames=6"],
    ]
    assert all(len(read_lines(run / "metrics.jsonl")) == 1 for run in run_all(tmp_path, "two", runs, 2))


def test_processes_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    ended = train_here(sequence_run(tmp_path), "training.sequence_parallel=2")
    assert ended.code == 2 and "1 process(es) were started" in ended.printed


BALANCED: dict[str, list[str]] = {
    "plain": [],
    "chunks": CHUNKS,
    "cppo": ["algorithm.prune_rate=0.5", "algorithm.prune_correction=true"],
    "several updates": SEVERAL_UPDATES,
    "kl": ["algorithm.kl_coef=0.1", "training.balance=true"],
}
BALANCED |= {f"{name}, frozen tower": [*FROZEN, *more] for name, more in BALANCED.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("ranks, more", [(2, []), (4, ["training.sequence_parallel=2"])], ids=["two", "two of two"])
def test_rollouts_balanced_over_data_ranks_train_what_one_process_trains(
    ranks: int, more: list[str], tmp_path: Path
) -> None:
    """Three groups on two data ranks: one is split, or goes to the other rank, its features with it; where the tower
    trains, their gradient comes back."""
    sequence_run(tmp_path)
    one = run_all(tmp_path, "one", list(BALANCED.values()), 1)
    several = run_all(tmp_path, "several", [[*own, *more] for own in BALANCED.values()], ranks)
    for name, expected, found in zip(BALANCED, one, several, strict=True):
        assert_same_weights(found, expected, name)
        lines = read_lines(found / "metrics.jsonl")
        # Of two or three responses behind a prompt that are left of a group, none is worth a second prompt.
        assert name.startswith("cppo") or sum(line["balance/split_groups"] for line in lines) > 0, name
        assert all(1 <= line["balance/cost_spread"] < 1.6 for line in lines), name

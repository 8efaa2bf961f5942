"""Whole runs whose updates are shared by sequence ranks train what one process trains.

Everything around the update is what it is without: questions, rollouts and rewards differ from rank to rank, metrics
count each group once, and checkpoints are those of any other run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.integration.test_deepspeed import deepspeed_config
from tests.support.layouts import distance
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, read_lines, run_cli, write_config

TOLERANCE = 1e-5
FROZEN = ["model.train=[language]"]
FEATURES: dict[str, list[str]] = {
    "plain": [],
    "chunks": ["training.micro_batch_tokens=121"],
    "kl and entropy": [*FROZEN, "algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.1"],
    "kl, trained tower": ["algorithm.kl_coef=0.1", "model.gradient_checkpointing=true"],
    "token rewards": [*FROZEN, "algorithm.kl_coef=0.1", "algorithm.kl_in=token_reward"],
    # Half of an adapter begins at zero and is nothing but what Adam made of gradients, rounding included.
    "lora": [*FROZEN, "model.lora.rank=4", "algorithm.kl_coef=0.1", "training.adam_epsilon=1e-2"],
    "cppo": [*FROZEN, "algorithm.prune_rate=0.5", "algorithm.prune_fill=true"],
    "several updates": ["algorithm.minibatches=2", "algorithm.num_iterations=2", "rollout.logprobs=recompute"],
    "sequences": ["algorithm.preset=gspo", "algorithm.minibatches=1", "algorithm.num_iterations=2"],
    "resampled": ["algorithm.resample_rounds=2"],
    "nothing shared": ["model.share_prefix=false"],
}
# What only sequence ranks have.
OF_RANKS = {
    "prompts together": ["rollout.split=prompts"],
    "prompts in parts": ["rollout.divide_prefix=always"],
    "one question": [],
}
FEATURES |= {
    "prompts together": [*FROZEN],
    "prompts in parts": [*FROZEN],
    "one question": ["training.prompts_per_step=1"],
}
DEFAULT = ("prompts in parts", "lora", "several updates")
# What depends on how the work was done, not on what was computed.
ABOUT_THE_WORK = ("seconds", "step_seconds", "tokens_per_second", "generation/", "core_wait_share", "mismatch/")


def sections(folder: Path, model: Path) -> dict[str, Any]:
    return {
        "run": {"resume": "auto"},
        "model": {"path": str(model), "train": ["tower", "merger", "language"]},
        "data": {"train": str(folder / "clips" / "train.jsonl")},
        "media": {"workers": 0},
        "prompt": {
            "max_prompt_tokens": 100,
            "instructions": {"multiple_choice": "Name the colours in order, then answer with a letter."},
        },
        "rollout": {"num_generations": 5, "max_new_tokens": 20},
        "training": {
            "steps": 3,
            "prompts_per_step": 3,
            "micro_batch_tokens": 150,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-4,
        },
        "observe": {"trackers": [], "report": False},
    }


@pytest.mark.parametrize(
    "names", [pytest.param(tuple(FEATURES), marks=pytest.mark.matrix, id="all"), pytest.param(DEFAULT, id="some")]
)
def test_runs_on_sequence_ranks_train_what_one_process_trains(names: tuple[str, ...], tmp_path: Path) -> None:
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "24", "--eval", "8"])
    config = write_config(tmp_path / "run.yaml", sections(tmp_path, ROOT / "assets/tiny-qwen2_5-vl"))
    places = {name: (tmp_path / f"{number}-alone", tmp_path / f"{number}") for number, name in enumerate(names)}

    def runs(place: int, *more: str) -> dict[str, list[str]]:
        return {
            name: [*FEATURES[name], f"run.dir={places[name][place]}", *more, *(OF_RANKS.get(name, ()) if more else ())]
            for name in names
        }

    for file, wanted, ranks in (
        ("alone.json", runs(0), 1),
        ("shared.json", runs(1, "training.sequence_parallel=2"), 2),
    ):
        (tmp_path / file).write_text(json.dumps(wanted))
        launch_ranks(
            "tests.integration.sequence_runs",
            *(str(config), str(tmp_path / file)),
            ranks=ranks,
            timeout_seconds=120 + 60 * len(names),
        )
    for name, (alone, shared) in places.items():
        weights = "adapter_model" if name == "lora" else "model"
        expected, found = (load_file(run / f"checkpoints/step-000003/{weights}.safetensors") for run in (alone, shared))
        far = {weight: apart for weight, apart in distance(found, expected).items() if not apart <= TOLERANCE}
        assert not far, (name, far)
        for of_one, of_two in zip(*(read_lines(run / "metrics.jsonl") for run in (alone, shared)), strict=True):
            assert {*of_one, "seconds/idle"} == set(of_two), name
            compared = {
                key: value
                for key, value in of_one.items()
                if isinstance(value, float | int) and not key.startswith(ABOUT_THE_WORK)
            }
            assert {key: of_two[key] for key in compared} == pytest.approx(compared, rel=1e-4, abs=1e-6), name


def test_sequence_ranks_under_zero_3_go_on_from_one_process(tmp_path: Path) -> None:
    """Four processes: two data ranks of two; generation in turns, frozen tower, weights scattered over all four."""
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "24", "--eval", "8"])
    config = write_config(tmp_path / "run.yaml", sections(tmp_path, ROOT / "assets/tiny-qwen2_5-vl"))
    deepspeed = ["training.engine=deepspeed", f"training.deepspeed_config={deepspeed_config(tmp_path, 3)}"]
    shared = [*FROZEN, "training.sequence_parallel=2", "rollout.gather=layers", *deepspeed, "training.steps=2"]
    alone = tmp_path / "alone"
    done = run_cli("train", str(config), *FROZEN, "training.steps=2", f"run.dir={alone}")
    assert done.returncode == 0, done.stdout + done.stderr
    launch_ranks("vlm_pg.cli", "train", str(config), *shared, f"run.dir={tmp_path / 'shared'}", ranks=4)
    files = (run / "checkpoints/step-000002/model.safetensors" for run in (alone, tmp_path / "shared"))
    expected, found = map(load_file, files)
    far = {weight: apart for weight, apart in distance(found, expected).items() if not apart <= TOLERANCE}
    assert not far


@pytest.mark.matrix
def test_ranks_that_gather_weights_in_turns_make_equally_many_calls(tmp_path: Path) -> None:
    """Tiles and pieces while one rank has nothing to ask, or fewer frames of a video than the other."""
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "8", "--eval", "4"])
    config = write_config(tmp_path / "run.yaml", sections(tmp_path, ROOT / "assets/tiny-qwen2_5-vl"))
    deepspeed = ["training.engine=deepspeed", f"training.deepspeed_config={deepspeed_config(tmp_path, 3)}"]
    common = [*FROZEN, *deepspeed, "rollout.gather=layers", "training.steps=1"]
    runs = {
        "one question": ["training.prompts_per_step=1", "model.mlp_tile_rows=16"],
        "three frames": ["training.sequence_parallel=2", "model.vision_piece_tokens=1", "media.max_frames=6"],
    }
    wanted = {name: [*common, *more, f"run.dir={tmp_path / name}"] for name, more in runs.items()}
    (tmp_path / "runs.json").write_text(json.dumps(wanted))
    launch_ranks(
        "tests.integration.sequence_runs", *(str(config), str(tmp_path / "runs.json")), ranks=2, timeout_seconds=200
    )
    assert all(len(read_lines(tmp_path / name / "metrics.jsonl")) == 1 for name in runs)


def test_what_cannot_be_divided_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "24", "--eval", "8"])
    config = write_config(tmp_path / "run.yaml", sections(tmp_path, ROOT / "assets/tiny-qwen2_5-vl"))
    done = run_cli("train", str(config), "training.sequence_parallel=2")
    assert done.returncode == 2 and "1 process(es) were started" in done.stderr, done.stdout + done.stderr
    with pytest.raises(AssertionError, match=r"can be divided over 1, 2, 4 processes"):
        launch_ranks("vlm_pg.cli", "train", str(config), "training.sequence_parallel=3", ranks=3)


DEALT: dict[str, list[str]] = {
    "plain": [],
    "chunks": ["training.micro_batch_tokens=121"],
    "cppo": ["algorithm.prune_rate=0.5", "algorithm.prune_correction=true"],
    "several updates": ["algorithm.minibatches=2", "algorithm.num_iterations=2", "rollout.logprobs=recompute"],
    "kl": ["algorithm.kl_coef=0.1", "training.balance=true"],
}
DEALT |= {f"{name}, frozen tower": [*FROZEN, *more] for name, more in DEALT.items()}
SHARED = ["training.sequence_parallel=2"]
DEALT_DEFAULT = ("chunks, frozen tower", "several updates", "kl")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "ranks, more, names",
    [
        pytest.param(2, [], DEALT_DEFAULT, id="two data ranks"),
        # What is dealt is the same; the deal goes over two of four processes.
        pytest.param(4, SHARED, ("chunks, frozen tower", "kl"), id="two of two"),
        pytest.param(2, [], tuple(DEALT), marks=pytest.mark.matrix, id="two data ranks, all"),
        pytest.param(4, SHARED, tuple(DEALT), marks=pytest.mark.matrix, id="two of two, all"),
    ],
)
def test_rollouts_dealt_over_data_ranks_train_what_one_process_trains(
    ranks: int, more: list[str], names: tuple[str, ...], tmp_path: Path
) -> None:
    """Three groups on two data ranks: one of them is split, or goes to the other rank, its features with it.

    Where the tower trains their gradient comes back.
    """
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "24", "--eval", "8"])
    config = write_config(tmp_path / "run.yaml", sections(tmp_path, ROOT / "assets/tiny-qwen2_5-vl"))
    for file, processes, own in (("alone", 1, []), ("dealt", ranks, more)):
        runs = {name: [*DEALT[name], *own, f"run.dir={tmp_path / file / name}"] for name in names}
        (tmp_path / f"{file}.json").write_text(json.dumps(runs))
        launch_ranks(
            "tests.integration.sequence_runs",
            *(str(config), str(tmp_path / f"{file}.json")),
            ranks=processes,
            timeout_seconds=400,
        )
    for name in names:
        weights = (tmp_path / of / name / "checkpoints/step-000003/model.safetensors" for of in ("alone", "dealt"))
        expected, found = map(load_file, weights)
        far = {weight: apart for weight, apart in distance(found, expected).items() if not apart <= TOLERANCE}
        assert not far, (name, far)
        lines = read_lines(tmp_path / "dealt" / name / "metrics.jsonl")
        # Of two or three responses behind a prompt that are left of a group, none is worth a second prompt.
        assert name.startswith("cppo") or sum(line["balance/split_groups"] for line in lines) > 0, name
        assert all(1 <= line["balance/cost_spread"] < 1.6 for line in lines), name

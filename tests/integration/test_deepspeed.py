"""Whole runs under ZeRO on two processes (gloo) train, save and resume; ranks generate independently.

Ranks that a launcher starts, DeepSpeed's too, are in test_nodes.py and test_torchrun.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from tests.integration.zero_generate import policy_with_many_stops, prompts_of, rollouts_of, tokens_of
from tests.support.processes import launch_ranks
from tests.support.runs import deepspeed_config as deepspeed_config
from tests.support.runs import read_lines, run_cli, save_tiny_model, write_config
from tests.support.short_run import short_run
from tests.support.tiny import tiny_model
from tests.support.tracker_files import expected_scalars, scalars
from vlm_pg.observe.run_folder import RunFolder


@pytest.mark.parametrize(
    "stage, train_vision, dtype",
    [(2, True, "bf16"), pytest.param(3, False, "fp32", marks=pytest.mark.matrix)],
    ids=["ZeRO-2", "ZeRO-3"],
)
def test_a_run_on_two_processes_saves_and_resumes(
    stage: int, train_vision: bool, dtype: str, tmp_path: Path, media_dir: Path
) -> None:
    """Video and text questions on different ranks: train, stop after two steps, go on, and the checkpoint loads."""
    records = [r for r in json.loads((media_dir / "questions.json").read_text()) if r["problem_id"] in (5, 8)]
    text = {"data_type": "text", "path": "", "problem_type": "numerical", "options": [], "process": ""}
    text |= {"problem": "How much is 2 + 3?", "solution": "<answer>5</answer>", "data_source": "sums"}
    records = [records[0], text | {"problem_id": 1001}, records[1], text | {"problem_id": 1002}]
    (tmp_path / "records.json").write_text(json.dumps(records))
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path / "run"), "resume": "auto"},
        "model": {
            "path": str(save_tiny_model(tmp_path / "model")),
            "train": ["tower", "merger", "language"] if train_vision else ["language"],
            "dtype": dtype,
        },
        "data": {"train": str(tmp_path / "records.json"), "media_root": str(media_dir), "shuffle": False},
        "media": {"max_frames": 4, "max_pixels": 3136 * 4, "workers": int(stage == 3)},
        "rollout": {"num_generations": 2, "max_new_tokens": 4},
        "training": {
            "steps": 2,
            "prompts_per_step": 2,
            "engine": "deepspeed",
            "deepspeed_config": f"configs/deepspeed/zero{stage}.json",
            "weight_decay": 0.1,
            "learning_rate": 1e-3,
        },
        "observe": {"report": False},
    }
    config = write_config(tmp_path / "run.yaml", sections)
    launch_ranks("vlm_pg.cli", "train", str(config))
    printed = launch_ranks("vlm_pg.cli", "train", str(config), "training.steps=4")
    assert "resuming after step 2" in printed
    assert "setting changed since the run began: training.steps: 2 -> 4" in printed
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    # By one rank, and without a process group of accelerate's.
    folder = RunFolder(tmp_path / "run")
    assert scalars(folder) == expected_scalars(folder) and len(list(folder.tensorboard.iterdir())) == 2
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in tiny_model().parameters())
    AutoProcessor.from_pretrained(checkpoint)


@pytest.mark.matrix
def test_without_a_launcher_deepspeed_runs_in_one_process(tmp_path: Path) -> None:
    config = str(short_run(tmp_path))
    zero2 = ("training.engine=deepspeed", "training.deepspeed_config=configs/deepspeed/zero2.json")
    for steps, options, printed in (
        (1, zero2, "engine deepspeed (ZeRO-2"),
        (2, zero2, "resuming after step 1"),
        # Nothing of DeepSpeed's is in a checkpoint, so torch goes on from it as well.
        (3, (), "setting changed since the run began: training.engine: deepspeed -> torch"),
    ):
        done = run_cli("train", config, f"training.steps={steps}", *options, DS_ACCELERATOR="cpu")
        assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr
    assert not list((tmp_path / "run" / "checkpoints").rglob("*.pt"))
    refused = run_cli("train", config, zero2[0], "training.deepspeed_config=nope.json", DS_ACCELERATOR="cpu")
    assert refused.returncode == 2 and "cannot be read" in refused.stderr


def test_in_a_flat_buffer_layers_of_one_input_are_neighbours(tmp_path: Path) -> None:
    """Under ZeRO-2 a decode step has packed products although weights must stay where DeepSpeed put them."""
    config, out = deepspeed_config(tmp_path, 2), tmp_path / "tokens"
    printed = launch_ranks("tests.integration.zero_generate", str(out), str(config), "auto", "1", "qwen2_5_vl", ranks=1)
    assert "separate: None" in printed


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family, gather, rounds", [("qwen2_5_vl", "all", 16), ("qwen2_5_vl", "layers", 4), ("qwen3_5", "layers", 3)]
)
def test_ranks_generate_independently(family: str, gather: str, rounds: int, tmp_path: Path) -> None:
    """Under ZeRO-3 one rank has a short question, the other four with media: tokens are those of one process."""
    out, config = tmp_path / "tokens", deepspeed_config(tmp_path, 3)
    launch_ranks("tests.integration.zero_generate", str(out), str(config), gather, str(rounds), family)
    policy = policy_with_many_stops(family)
    rollouts, lengths = rollouts_of(policy), []
    for rank in range(2):
        prompts = prompts_of(policy, rank)
        expected = [tokens_of(rollouts, prompts, step) for step in range(rounds)]
        assert json.loads(Path(f"{out}.{rank}").read_text()) == expected
        lengths.append([sum(map(len, tokens)) for tokens in expected])
    assert all(short < long for short, long in zip(*lengths, strict=True))
    assert min(lengths[0]) * 8 < max(lengths[1]), "the ranks should finish at very different lengths"

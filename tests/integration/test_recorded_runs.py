"""Runs whose updates start from the forward of sampling learn what runs learn that compute it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import launch_ranks
from tests.support.runs import read_lines
from tests.support.small_run import clips_run
from vlm_pg.config import load_config
from vlm_pg.training.main import train

# Rewards that differ by text, so that every group trains.
SPREAD = "def spread(response, question):\n    return sum(map(ord, response)) % 7 / 7\n"
CHUNKED = ("prompt.max_prompt_tokens=70", "training.micro_batch_tokens=90")
# Settings, and how many of the tokens computed were recorded: all, those of the first update, or some.
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chunks": ("all", (*CHUNKED, "algorithm.entropy_coef=0.1")),
    "pruning": ("all", ("algorithm.prune_rate=0.5", "algorithm.resample_rounds=2")),
    "several updates": (
        "first",
        (
            "algorithm.minibatches=3",
            "algorithm.num_iterations=2",
            "algorithm.entropy_coef=0.05",
            "algorithm.kl_coef=0.1",
            "algorithm.kl_in=loss",
        ),
    ),
    "scored": ("none", ("rollout.logprobs=recompute", "algorithm.num_iterations=2", "algorithm.mask_truncated=true")),
    "adapter": ("all", ("model.train=[language]", "model.lora={rank: 4}", "model.gradient_checkpointing=true")),
    "tiles": (
        "all",
        ("model.mlp_tile_rows=32", "model.gradient_checkpointing=true", "model.offload_layer_inputs=true"),
    ),
    "merger alone": ("all", ("model.train=[merger]", *CHUNKED)),
    "short": ("all", ("rollout.max_new_tokens=2", "algorithm.loss_average=sequence_mean")),
    "little room": ("some", ("rollout.max_batch_rollouts=4", "rollout.keep_forward_gb=0.0003")),
    "oracle": ("none", ("model.attention_kernel=oracle",)),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "spread.py").write_text(SPREAD)
    return clips_run(
        folder,
        rollout={"max_new_tokens": 18, "mismatch_every": 1},
        reward={"functions": [{"function": f"{folder}/spread.py:spread"}]},
        training={"steps": 2},
        run={"seed": 3},
    )


def trained(config: Path, run: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A run's metrics, and all tensors of its last checkpoint: weights and the optimizer's moments."""
    assert train(load_config(config, [f"run.dir={run}", *overrides])) == 0
    files = (run / "checkpoints" / "step-000002").rglob("*.safetensors")
    tensors = {f"{path.name} {name}": x for path in files for name, x in load_file(path).items()}
    return read_lines(run / "metrics.jsonl"), tensors


@pytest.mark.parametrize("logprobs", ["reuse", "recompute"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_on_policy_step_has_the_log_probabilities_of_sampling(
    config: Path, tmp_path: Path, dtype: str, logprobs: str
) -> None:
    lines, _ = trained(config, tmp_path / "run", f"model.dtype={dtype}", f"rollout.logprobs={logprobs}")
    assert len(lines) == 2
    for line in lines:
        assert line["tokens_recorded"] == line["tokens_computed"] > 0
        assert all(line[f"mismatch/{name}"] == 0.0 for name in ("kl", "abs_mean", "abs_max"))
        assert line["mismatch/exp_abs_mean"] == line["ratio_mean"] == line["ratio_min"] == line["ratio_max"] == 1.0
        assert line["clip_low"] == line["clip_high"] == line["behaviour_kl"] == 0.0
        assert line["grad_norm"] > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_learns_what_it_learns_from_a_forward_of_its_own(config: Path, tmp_path: Path, name: str) -> None:
    expected, overrides = SETTINGS[name]
    lines, found = trained(config, tmp_path / "recorded", *overrides)
    computed_lines, computed = trained(config, tmp_path / "computed", *overrides, "rollout.keep_forward_gb=0")
    for line, other in zip(lines, computed_lines, strict=True):
        recorded, tokens = line["tokens_recorded"], line["tokens_computed"]
        assert tokens == other["tokens_computed"] and other["tokens_recorded"] == 0 < line["grad_norm"]
        if expected in ("all", "none"):
            assert recorded == tokens * (expected == "all")
        else:
            assert 0 < recorded < tokens
        if expected in ("all", "first"):
            assert line["mismatch/abs_max"] == 0.0
        assert ("groups_chunked" in line and line["groups_chunked"] > 0) == (CHUNKED[0] in overrides)
    assert found.keys() == computed.keys()
    for key, tensor in computed.items():
        if tensor.is_floating_point():
            assert (found[key] - tensor).norm() <= 5e-4 * tensor.norm(), key


@pytest.mark.parametrize("balance", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_ranks_with_sharded_weights_start_from_recorded_forwards(config: Path, tmp_path: Path, balance: bool) -> None:
    """Three questions on two ranks; rollouts that balancing moves leave their record behind."""
    found = []
    for gib in ("null", "0"):
        run = tmp_path / f"run-{gib}"
        settings = ["engine=deepspeed", "deepspeed_config=configs/deepspeed/zero3.json", "prompts_per_step=3"]
        settings += [f"balance={str(balance).lower()}"]
        words = [f"training.{setting}" for setting in settings]
        launch_ranks("vlm_pg.cli", "train", str(config), f"run.dir={run}", f"rollout.keep_forward_gb={gib}", *words)
        weights = load_file(next((run / "checkpoints" / "step-000002").glob("model*.safetensors")))
        found.append((read_lines(run / "metrics.jsonl"), weights))
    (lines, recorded), (_, computed) = found
    for line in lines:
        assert 0 < line["tokens_recorded"] <= line["tokens_computed"]
        assert balance or line["tokens_recorded"] == line["tokens_computed"]
    assert all((recorded[name] - x).norm() <= 5e-4 * x.norm() for name, x in computed.items())

"""Runs whose visual features are on disk: equal bit for bit to runs without, and no tower is called twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.test_deepspeed import deepspeed_config
from tests.support.processes import launch_ranks
from tests.support.runs import read_lines, run_cli, save_tiny_model
from tests.support.small_run import small_run
from vlm_pg.cache.eviction import entry_files

pytestmark = pytest.mark.matrix

WEIGHTS = "checkpoints/step-000002/model.safetensors"
# What a run took, which is not what it computed.
OF_TIME = ("time", "seconds", "step_seconds", "tokens_per_second", "generation/tokens_per_second", "core_wait_share")
ZERO_3 = ["training.engine=deepspeed", "training.deepspeed_config={zero3}"]
# Two ranks, two steps. Each is an epoch, and memory keeps nothing from step to step.
LAYOUTS: dict[str, list[str]] = {
    "data": [],
    "sequence": ["training.sequence_parallel=2"],
    "in turns": [*ZERO_3, "rollout.gather=layers"],
    "gathered": [*ZERO_3, "rollout.gather=all"],
    "sequence in turns": [*ZERO_3, "rollout.gather=layers", "training.sequence_parallel=2"],
    "in parts": ["training.sequence_parallel=2", "rollout.divide_prefix=always"],
    "pieces": ["model.vision_piece_tokens=4"],
    "bf16": ["model.dtype=bf16"],
    "bf16 in turns": [*ZERO_3, "rollout.gather=layers", "model.dtype=bf16"],
    "loss": ["algorithm.kl_in=loss", "algorithm.resample_rounds=1", "algorithm.minibatches=2"],
    "DeepStack": ["model.path={qwen3_vl}", "prompt.max_prompt_tokens=400", "training.micro_batch_tokens=450"],
}


def overrides(name: str, folder: Path, run: str, kept: bool) -> list[str]:
    files = {"zero3": str(folder / "deepspeed.json"), "qwen3_vl": str(folder / "qwen3_vl")}
    cache = [f"cache.folder={folder / name / 'cache'}"] if kept else []
    always = ["training.prompts_per_step=4", "data.limit=4", "model.vision_cache_mb=0", "eval.before=false"]
    always += ["training.steps=2", "training.checkpoint_every=2"]
    return [*always, *(part.format(**files) for part in LAYOUTS[name]), f"run.dir={folder / name / run}", *cache]


def computed(run: Path) -> list[Any]:
    """Everything a run says of its steps and answers."""
    lines = [
        {key: value for key, value in line.items() if not key.startswith(OF_TIME)}
        for line in read_lines(run / "metrics.jsonl")
    ]
    return [lines, read_lines(run / "rollouts.jsonl"), json.loads((run / "summary.json").read_text())["eval_after"]]


def test_runs_on_two_ranks_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Without a cache, with an empty one, with all features, and with some, of which one rank may find what the other
    must compute."""
    config = small_run(tmp_path)
    deepspeed_config(tmp_path, 3)
    save_tiny_model(tmp_path / "qwen3_vl", "qwen3_vl")
    runs = {
        f"{name} {run}": overrides(name, tmp_path, run, kept=run != "without")
        for name in LAYOUTS
        for run in ("without", "first", "again", "half")
    }
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    launch_ranks(
        "tests.integration.kept_feature_runs",
        *(str(config), str(tmp_path / "runs.json")),
        ranks=2,
        timeout_seconds=120 + 60 * len(LAYOUTS),
    )
    for name in LAYOUTS:
        expected = load_file(tmp_path / name / "without" / WEIGHTS)
        for run in ("first", "again", "half"):
            found = load_file(tmp_path / name / run / WEIGHTS)
            assert all(found[key].equal(value) for key, value in expected.items()), (name, run)
            assert computed(tmp_path / name / run) == computed(tmp_path / name / "without"), (name, run)
        kinds = [stored.kind for stored in entry_files(tmp_path / name / "cache")]
        assert kinds.count("features") >= kinds.count("frames") > 4, name


@pytest.mark.parametrize("name", ["sequence", "data", "in turns", "gathered", "pieces", "bf16 in turns", "DeepStack"])
def test_a_fill_leaves_nothing_to_the_tower(name: str, tmp_path: Path) -> None:
    """One process without the language model makes what two ranks of any layout would make."""
    config = small_run(tmp_path)
    deepspeed_config(tmp_path, 3)
    if name == "DeepStack":
        save_tiny_model(tmp_path / "qwen3_vl", "qwen3_vl")
    filled = run_cli("cache", "fill", str(config), *overrides(name, tmp_path, "fill", kept=True))
    assert filled.returncode == 0, filled.stdout + filled.stderr
    assert "train.jsonl: features of 4 of 4 media are kept" in filled.stdout
    before = {stored.path: stored.path.stat().st_mtime_ns for stored in entry_files(tmp_path / name / "cache")}
    (tmp_path / "runs.json").write_text(json.dumps({"again": overrides(name, tmp_path, "again", kept=True)}))
    launch_ranks("tests.integration.kept_feature_runs", *(str(config), str(tmp_path / "runs.json")), ranks=2)
    assert before == {stored.path: stored.path.stat().st_mtime_ns for stored in entry_files(tmp_path / name / "cache")}

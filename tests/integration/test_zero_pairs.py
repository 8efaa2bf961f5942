"""Whole runs under ZeRO on two ranks that make unequally many passes, whose streams and media differ in length.

Losses must carry a graph of the same shape on an idle rank, and every call of an MLP, a norm and the tower is a
collective under ZeRO-3: otherwise ranks wait for different collectives. The first updates are compared, weight by
weight, with the gradient that was computed (``training.checked_updates``).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import launch_ranks
from tests.support.runs import deepspeed_config
from tests.support.small_run import clips_run

pytestmark = pytest.mark.matrix

FEATURES = {
    "entropy": ["algorithm.entropy_coef=0.1"],
    "kl_in_loss": ["algorithm.kl_coef=0.1"],
    "kl_in_reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=token_reward"],
    "pruning": ["algorithm.prune_rate=0.5"],
    "several_updates": ["algorithm.num_iterations=2"],
    "lora": ["model.lora.rank=4", "model.train=[language]"],
    "importance_cap": ["algorithm.importance_cap=2.0", "rollout.logprobs=recompute"],
}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if set(pair) != {"kl_in_loss", "kl_in_reward"}]
TOGETHER = [
    ("entropy", "kl_in_loss", "pruning", "several_updates", "importance_cap"),
    ("entropy", "several_updates", "lora", "kl_in_loss"),
    ("pruning", "lora", "kl_in_reward", "importance_cap"),
]
MEMORY_SAVING = [
    *("model.gradient_checkpointing=true", "model.offload_layer_inputs=true", "model.offload_prefix_states=true"),
    *("model.mlp_tile_rows=16", "model.vision_piece_tokens=4"),
]


def run_all(folder: Path, stage: int, runs: list[list[str]], **training: Any) -> tuple[list[dict[str, Any]], str]:
    """A line of each run, and everything rank 0 printed. One group fits a micro-batch: a rank with one of three
    idles."""
    of_zero = {"engine": "deepspeed", "deepspeed_config": str(deepspeed_config(folder, stage))}
    clips_run(folder, training={"steps": 2, **of_zero, **training})
    (folder / "runs.json").write_text(json.dumps(runs))
    arguments = (str(folder), str(folder / "runs.json"))
    printed = launch_ranks("tests.integration.zero_pairs", *arguments, timeout_seconds=400 + 60 * len(runs))
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"run"')]
    assert [line["run"] for line in lines] == runs
    return lines, printed


@pytest.mark.parametrize("features", [pytest.param(PAIRS, id="pairs"), pytest.param(TOGETHER, id="together")])
def test_features_train_on_ranks_with_unequal_passes(features: list[tuple[str, ...]], tmp_path: Path) -> None:
    runs = [[value for name in names for value in FEATURES[name]] for names in features]
    # Balanced work would leave no rank idle.
    lines, _ = run_all(tmp_path, 3, runs, balance=False, adam_epsilon=1e-8)
    for line in lines:
        assert line["idle"] > 0, line
        assert len(line["grad_norms"]) == 2 and all(norm and norm > 0 for norm in line["grad_norms"]), line


@pytest.mark.parametrize("stage, adapter", [(3, False), (2, False), (2, True), (3, True)], ids=str)
def test_memory_saving_changes_no_gradient(stage: int, adapter: bool, tmp_path: Path) -> None:
    """Tiles, pieces of the tower, checkpointing and offloading: the gradient norms of two steps are those without."""
    trained = FEATURES["lora"] if adapter else []
    (plain, saving), printed = run_all(tmp_path, stage, [trained, trained + MEMORY_SAVING])
    assert len(plain["grad_norms"]) == 2 and all(plain["grad_norms"])
    assert saving["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-4)
    assert "MLPs in tiles of 16 rows (as set)" in printed

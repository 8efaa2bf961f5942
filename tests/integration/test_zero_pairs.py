"""Features of the algorithm two by two under ZeRO-3, on ranks that make unequally many passes.

What a loss reads must carry a graph of the same shape on a rank that is idle, or ranks wait for different collectives.
The first updates are compared, weight by weight, with the gradient that was computed (``training.checked_updates``).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.integration.test_deepspeed import deepspeed_config
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, write_config

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


@pytest.mark.parametrize(
    "features", [pytest.param(PAIRS, marks=pytest.mark.matrix, id="pairs"), pytest.param(TOGETHER, id="together")]
)
def test_features_train_on_ranks_with_unequal_passes(features: list[tuple[str, ...]], tmp_path: Path) -> None:
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "24", "--eval", "8"])
    write_config(
        tmp_path / "run.yaml",
        {
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "train": ["tower", "merger", "language"]},
            "data": {"train": str(tmp_path / "clips" / "train.jsonl")},
            "media": {"workers": 0},
            # What the model was trained with: at other words all its answers earn the same, and no gradient is left.
            "prompt": {
                "max_prompt_tokens": 100,
                "instructions": {"multiple_choice": "Name the colours in order, then answer with a letter."},
            },
            "rollout": {"num_generations": 4, "max_new_tokens": 20},
            "training": {
                "steps": 2,
                "prompts_per_step": 3,
                # One group of a rank's two, so that the other rank, which has one, is idle.
                "micro_batch_tokens": 130,
                "learning_rate": 1e-3,
                "engine": "deepspeed",
                "deepspeed_config": str(deepspeed_config(tmp_path, 3)),
                # Work dealt evenly would leave nobody idle.
                "balance": False,
            },
            "observe": {"trackers": [], "report": False},
        },
    )
    runs = [[value for name in names for value in FEATURES[name]] for names in features]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    printed = launch_ranks(
        "tests.integration.zero_pairs",
        *(str(tmp_path), str(tmp_path / "runs.json")),
        timeout_seconds=300 + 60 * len(runs),
    )
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"run"')]
    assert [line["run"] for line in lines] == runs
    for line in lines:
        print(line)
        assert line["idle"] > 0, line
        assert len(line["grad_norms"]) == 2 and all(norm and norm > 0 for norm in line["grad_norms"]), line

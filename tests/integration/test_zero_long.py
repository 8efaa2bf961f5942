"""Tiles, pieces of the tower and what is put away on two ranks whose streams and media differ in length, under ZeRO.

Under ZeRO-3 every call of an MLP, of a norm and of the tower is a collective: ranks that made unequally many would wait
for ever. The gradient norms of two steps are those of the same run without any of it; the first updates are compared,
weight by weight, with the gradient that was computed (``training.checked_updates``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.integration.test_deepspeed import deepspeed_config
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, write_config

pytestmark = pytest.mark.matrix

ALL = [
    *("model.gradient_checkpointing=true", "model.offload_layer_inputs=true", "model.offload_prefix_states=true"),
    *("model.mlp_tile_rows=16", "model.vision_piece_tokens=4"),
]
LORA = ["model.lora.rank=4", "model.train=[language]"]


@pytest.mark.parametrize(
    "stage, adapter",
    [(3, False), *(pytest.param(*case, marks=pytest.mark.matrix) for case in ((2, False), (2, True), (3, True)))],
    ids=str,
)
def test_two_ranks_train_as_without(stage: int, adapter: bool, tmp_path: Path) -> None:
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "24", "--eval", "8"])
    write_config(
        tmp_path / "run.yaml",
        {
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "train": ["tower", "merger", "language"]},
            "data": {"train": str(tmp_path / "clips" / "train.jsonl")},
            "media": {"workers": 0},
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
                # Gradients of key biases are rounding alone, of which Adam would make full steps.
                "adam_epsilon": 1e-4,
                "engine": "deepspeed",
                "deepspeed_config": str(deepspeed_config(tmp_path, stage)),
            },
            "observe": {"trackers": [], "report": False},
        },
    )
    trained = LORA if adapter else []
    runs = [trained, trained + ALL]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    arguments = (str(tmp_path), str(tmp_path / "runs.json"))
    printed = launch_ranks("tests.integration.zero_pairs", *arguments, timeout_seconds=400)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"run"')]
    assert [line["run"] for line in lines] == runs
    whole, kept_small = (line["grad_norms"] for line in lines)
    assert len(whole) == 2 and all(whole)
    assert kept_small == pytest.approx(whole, rel=1e-4)
    assert "MLPs in tiles of 16 rows (as set)" in printed

"""A run of a few seconds with every phase that a step can have: clips, a KL in the reward, evaluation."""

from __future__ import annotations

from pathlib import Path

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import ROOT
from tests.support.runs import write_config

STEPS = 3


def small_run(folder: Path) -> Path:
    """Its configuration, ``folder / "run.yaml"``; the clips lie in ``folder``. A checkpoint is written every step."""
    prepare_embedded(["--out", str(folder / "clips"), "--train", "12", "--eval", "4"])
    return write_config(
        folder / "run.yaml",
        {
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "train": ["language"]},
            "data": {
                "train": str(folder / "clips" / "train.jsonl"),
                "eval": {"seen": str(folder / "clips" / "eval_seen.jsonl")},
            },
            "media": {"workers": 0},
            "prompt": {
                "max_prompt_tokens": 100,
                "instructions": {"multiple_choice": "Name the colours in order, then answer with a letter."},
            },
            "rollout": {"num_generations": 2, "max_new_tokens": 8},
            "algorithm": {"kl_coef": 0.1, "kl_in": "reward"},
            "training": {
                "steps": STEPS,
                "prompts_per_step": 3,
                "micro_batch_tokens": 150,
                "learning_rate": 1e-3,
                "checkpoint_every": 1,
                "keep_checkpoints": 9,
            },
            "eval": {"controls": [], "control_sets": [], "headline_set": None},
            "observe": {"trackers": [], "report": False},
        },
    )

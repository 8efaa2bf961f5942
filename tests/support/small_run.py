"""Whole runs of a few seconds on clips of the embedded task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipelines.embedded import main as prepare_embedded
from tests.support.runs import ROOT, write_config

STEPS = 3


def clips_run(folder: Path, train: int = 24, evaluation: int = 8, **sections: dict[str, Any]) -> Path:
    """Render clips into ``folder``; the configuration ``folder / "run.yaml"`` trains all parts of the shipped tiny
    model.

    The words are those the model was trained with: at others all its answers earn the same, and no gradient is left.
    Key biases have gradients of rounding alone, of which Adam would make full steps without a larger epsilon.
    """
    prepare_embedded(["--out", str(folder / "clips"), "--train", str(train), "--eval", str(evaluation)])
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "train": ["tower", "merger", "language"]},
        "data": {"train": str(folder / "clips" / "train.jsonl")},
        "media": {"workers": 0},
        "prompt": {
            "max_prompt_tokens": 100,
            "instructions": {"multiple_choice": "Name the colours in order, then answer with a letter."},
        },
        "rollout": {"num_generations": 4, "max_new_tokens": 20},
        "training": {
            "steps": STEPS,
            "prompts_per_step": 3,
            "micro_batch_tokens": 130,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-4,
        },
        "observe": {"trackers": [], "report": False},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return write_config(folder / "run.yaml", values)


def small_run(folder: Path) -> Path:
    """A run with every phase of a step: a KL in the reward, evaluation, a checkpoint every step."""
    return clips_run(
        folder,
        train=12,
        evaluation=4,
        model={"train": ["language"]},
        data={"eval": {"seen": str(folder / "clips" / "eval_seen.jsonl")}},
        rollout={"num_generations": 2, "max_new_tokens": 8},
        algorithm={"kl_coef": 0.1, "kl_in": "reward"},
        training={"micro_batch_tokens": 150, "adam_epsilon": 1e-8, "checkpoint_every": 1, "keep_checkpoints": 9},
        eval={"controls": [], "control_sets": [], "headline_set": None},
    )

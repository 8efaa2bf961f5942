"""Small run folders and rollout groups for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlm_pg.metrics import KL_CHART, REWARD_CHART, Metric
from vlm_pg.observe.logs import MetricsLog, RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.types import MediaRef, Prompt, RewardBreakdown, Rollout, RolloutGroup, Sample

REWARD = Metric("reward", "mean over rollouts", chart=REWARD_CHART)
REWARD_PART = Metric("reward/", "mean over rollouts", chart=REWARD_CHART)
KL = Metric("kl", "nat per token", chart=KL_CHART)
CONFIG = "run: {name: tiny}\nmodel: {path: assets/tiny}\ndata: {train: data/train.jsonl}\ntraining: {steps: 4}\n"


def make_group(
    sample_id: str = "17",
    texts: Sequence[str] = ("<think>red blue</think><answer>B</answer>", "<answer>A</answer>"),
    totals: Sequence[float | None] = (1.1, 0.1),
    frames: int = 8,
    question: str = "Which colour is first?",
) -> RolloutGroup:
    """A group with one rollout per text; accuracy 1 where the total is above 1."""
    sample = Sample(
        sample_id,
        question,
        (MediaRef("video", "17.mp4"),),
        ("A. red", "B. blue"),
        "B",
        "multiple_choice",
        "flashes",
        "order",
    )
    tokens = torch.arange(5)
    prompt = Prompt(
        sample_id,
        tokens,
        torch.zeros_like(tokens),
        tokens.expand(3, -1),
        content_key=f"pixels of {sample_id}",
        preview=tuple(np.full((56, 56, 3), 30 * index, np.uint8) for index in range(frames)),
        preview_seconds=tuple(index / 4 for index in range(frames)),
    )
    rewards = tuple(
        RewardBreakdown(total, {"accuracy": None if total is None else float(total > 1), "format": 1.0})
        for total in totals
    )
    rollouts = tuple(Rollout(torch.arange(3), torch.zeros(3), "stop", text) for text in texts)
    return RolloutGroup(sample, prompt, rollouts, 0, rewards, tuple(0.7 - 1.4 * i for i in range(len(texts))))


def eval_result(accuracy: float, kind: str = "eval", n: int = 200) -> dict[str, Any]:
    """One evaluation set as summary.json holds it."""
    category = {"order": {"accuracy": accuracy, "n": n}}
    return {
        "accuracy": accuracy,
        "standard_error": 0.02,
        "n": n,
        "n_bad_media": 7,
        "pass_at_k": {"1": 0.5, "8": 0.625},
        "format_rate": 0.9,
        "by_category": category,
        "chance": 0.25,
        "kind": kind,
    }


def make_summary() -> dict[str, Any]:
    """A complete summary.json."""
    before = {"seen": eval_result(0.447), "frames_shuffled": eval_result(0.24, "control")}
    after = {"seen": eval_result(0.935), "frames_shuffled": eval_result(0.26, "control")}
    return {
        "eval_before": {"accuracy": 0.447, "n": 200, "sets": before},
        "eval_after": {"accuracy": 0.935, "n": 200, "headline_set": "seen", "sets": after},
        "seconds": {"setup": 2.0, "rollout": 30.0, "train": 60.0, "total": 100.0},
        "versions": {"torch": "2.15.0"},
        "steps": 4,
        "attention_kernel": "cpu",
        "sharing": {"tokens_computed": 1000, "tokens_repeated": 4000, "ratio": 4.0},
        "bad_samples": {"missing_media": 3},
        "finished": True,
    }


def make_run(path: Path, steps: int = 4, groups: Sequence[RolloutGroup] | None = None) -> RunFolder:
    """A finished run with all its files."""
    folder = RunFolder.create(path, resume=False)
    folder.write_config(CONFIG)
    with MetricsLog(folder) as metrics, RolloutsLog(folder) as rollouts:
        for step in range(1, steps + 1):
            values = {REWARD: step / steps, REWARD_PART.of("accuracy"): step / steps, KL: 0.01 * step}
            metrics.write(step, {**values, "tokens_computed": 100 + step, "tokens_repeated": 400, "grad_norm": None})
            rollouts.write(step, groups if groups is not None else [make_group()])
    folder.write_summary(make_summary())
    record = {"sample_id": "9", "reason": "missing_media", "message": "9.mp4 is <not> there", "where": "train.jsonl:9"}
    folder.bad_samples.write_text(json.dumps(record) + "\n")
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

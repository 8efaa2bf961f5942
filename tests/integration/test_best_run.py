"""A whole run keeps its best checkpoint beside the newest, over a resume too, and says which one it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.runs import read_lines
from tests.support.short_run import short_run, train_here
from vlm_pg.training.checkpoints import find_checkpoints, read_state

STEPS = 6


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    of_training = {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": "reward"}
    config = short_run(tmp_path, training=of_training)
    run = tmp_path / "run"
    for until in (STEPS - 2, STEPS):
        ended = train_here(config, f"training.steps={until}")
        assert ended.code == 0, ended.printed
        rewards = {line["step"]: line["reward"] for line in read_lines(run / "metrics.jsonl")}
        assert len(rewards) == until and len(set(rewards.values())) > 2
        best = max(rewards, key=lambda step: (rewards[step], step))
        kept = find_checkpoints(run / "checkpoints")
        assert [step for step, _ in kept] == sorted({best, until})
        assert os.readlink(run / "checkpoints" / "best") == f"step-{best:06d}"
        score = read_state(run / "checkpoints" / "best")["score"]
        assert score == {"metric": "reward", "mean": rewards[best], "steps": 1}
        summary = json.loads((run / "summary.json").read_text())
        assert summary["best_checkpoint"] == f"checkpoints/step-{best:06d}"


def test_another_metric_is_refused_by_name(tmp_path: Path) -> None:
    ended = train_here(short_run(tmp_path), "training.keep_best=rewards")
    assert ended.code == 2 and "keep_best" in ended.printed and "'reward'" in ended.printed

"""A whole run keeps its best checkpoint beside the newest, over a resume too, and says which one it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

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
        assert [step for step, _ in find_checkpoints(run / "checkpoints")] == sorted({best, until})
        assert os.readlink(run / "checkpoints" / "best") == f"step-{best:06d}"
        score = read_state(run / "checkpoints" / "best")["score"]
        assert score == {"metric": "reward", "mean": rewards[best], "steps": 1}
        summary = json.loads((run / "summary.json").read_text())
        assert summary["best_checkpoint"] == f"checkpoints/step-{best:06d}"


@pytest.mark.matrix
def test_the_checkpoint_that_does_best_on_held_out_questions_stays(tmp_path: Path) -> None:
    """Its answers are there for every evaluation, and the accuracies stand in the lines of their steps alone."""
    records = tmp_path / "records.json"
    config = short_run(
        tmp_path,
        data={"train": str(records), "eval": {"held_out": str(records)}},
        training={"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 1, "keep_best": "eval/accuracy"},
        eval={"before": False, "after": False, "every": 2},
    )
    run = tmp_path / "run"
    for until in (STEPS - 2, STEPS):
        ended = train_here(config, f"training.steps={until}")
        assert ended.code == 0, ended.printed
        assert f"step-{until:06d}, held_out: accuracy" in ended.printed
    lines = read_lines(run / "metrics.jsonl")
    accuracies = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    assert list(accuracies) == [2, 4, 6]
    assert all(line["eval/accuracy/held_out"] == line["eval/accuracy"] for line in lines if line["step"] in accuracies)
    best = max(accuracies, key=lambda step: (accuracies[step], step))
    assert os.readlink(run / "checkpoints" / "best") == f"step-{best:06d}"
    score = read_state(run / "checkpoints" / "best")["score"]
    assert score == {"metric": "eval/accuracy", "mean": accuracies[best], "steps": 1}
    for step in accuracies:
        assert len(read_lines(run / f"eval_held_out_step-{step:06d}.jsonl")) == 6

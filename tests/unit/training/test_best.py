"""The best checkpoint is kept beside the newest ones and can be found, whatever is killed on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlm_pg.training import checkpoints
from vlm_pg.training.checkpoints import RunningScore, find_best, point_to_best


def make(folder: Path, step: int, *rewards: float | None) -> Path:
    score = RunningScore("reward")
    for reward in rewards:
        score.add({"reward": reward, "loss": 9.0})
    return checkpoints.commit(checkpoints.begin(folder, step), step, score.entry())


def keep(folder: Path, newest: int) -> list[str]:
    checkpoints.prune(folder, newest, point_to_best(folder, "reward"))
    return sorted(path.name for path in folder.iterdir())


def test_the_score_is_the_mean_since_the_last_checkpoint() -> None:
    score = RunningScore("reward")
    assert score.entry() == {}
    for value in (0.25, None, 0.75):
        score.add({"reward": value})
    score.add({"loss": 1.0})
    assert score.entry() == {"score": {"metric": "reward", "mean": 0.5, "steps": 2}}
    score.begin_again()
    assert score.entry() == {}
    nothing = RunningScore(None)
    nothing.add({"reward": 1.0})
    assert nothing.entry() == {}


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    kept = []
    for step, reward in enumerate((0.1, 0.9, 0.2, 0.3, 0.95, 0.4), start=1):
        make(tmp_path, step, reward)
        kept.append(keep(tmp_path, 2))
    assert kept == [
        ["best", "step-000001"],
        ["best", "step-000001", "step-000002"],
        ["best", "step-000002", "step-000003"],
        ["best", "step-000002", "step-000003", "step-000004"],
        ["best", "step-000004", "step-000005"],
        ["best", "step-000005", "step-000006"],
    ]
    assert os.readlink(tmp_path / "best") == "step-000005"
    assert checkpoints.problem_with(tmp_path / "best", check_hashes=True) is None
    assert [step for step, _ in checkpoints.candidates(tmp_path)] == [5, 6], "the link is no checkpoint"


def test_of_equals_the_newest_and_only_by_the_same_metric(tmp_path: Path) -> None:
    make(tmp_path, 1, 0.5)
    second = make(tmp_path, 2, 0.5)
    make(tmp_path, 3)
    other = {"score": {"metric": "accuracy", "mean": 1.0, "steps": 1}}
    checkpoints.commit(checkpoints.begin(tmp_path, 4), 4, other)
    for step, odd in enumerate(({"score": 3}, {"score": {"metric": "reward", "mean": "high"}}), start=5):
        checkpoints.commit(checkpoints.begin(tmp_path, step), step, odd)
    assert find_best(tmp_path, "reward") == second
    assert find_best(tmp_path, None) is None and find_best(tmp_path / "none", "reward") is None


@pytest.mark.parametrize("moment", ["before the link", "with a link half made", "before pruning"])
def test_a_killed_save_does_not_lose_the_best(moment: str, tmp_path: Path) -> None:
    make(tmp_path, 1, 0.9)
    keep(tmp_path, 1)
    make(tmp_path, 2, 0.95)
    if moment == "with a link half made":
        (tmp_path / ".tmp-best").symlink_to("step-000002")
    if moment == "before pruning":
        point_to_best(tmp_path, "reward")
    assert checkpoints.problem_with(tmp_path / "best") is None
    # The run goes on.
    make(tmp_path, 3, 0.1)
    assert keep(tmp_path, 1) == ["best", "step-000002", "step-000003"]
    assert os.readlink(tmp_path / "best") == "step-000002"


def test_a_damaged_best_is_no_best(tmp_path: Path) -> None:
    damaged = make(tmp_path, 1, 0.9)
    (damaged / checkpoints.STATE).unlink()
    second = make(tmp_path, 2, 0.1)
    assert point_to_best(tmp_path, "reward") == second


def test_a_link_that_leads_nowhere_is_removed_and_what_is_no_link_is_left(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("step-000009")
    assert point_to_best(tmp_path, "reward") is None and not os.path.lexists(tmp_path / "best")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").write_text("mine")
    path, told = make(tmp_path, 1, 0.5), []
    assert point_to_best(tmp_path, "reward", told.append) == path
    assert "could not be made to lead to" in told[0] and (tmp_path / "best" / "notes.txt").exists()

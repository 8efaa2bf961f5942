"""Checkpoints that a killed save leaves nothing of, and the best of them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from vlm_pg.training import checkpoints
from vlm_pg.training.checkpoints import RunningScore, find_best, point_to_best


def make(folder: Path, step: int, content: str = "weights") -> Path:
    temporary = checkpoints.begin(folder, step)
    (temporary / "sub").mkdir()
    (temporary / "model.bin").write_text(content)
    (temporary / "sub" / "state.bin").write_text("state")
    return checkpoints.commit(temporary, step, {"seed": 7})


def test_a_committed_checkpoint_is_found_and_read(tmp_path: Path) -> None:
    path = make(tmp_path, 12)
    assert checkpoints.find_checkpoints(tmp_path) == [(12, path)]
    assert checkpoints.read_state(path) == {"step": 12, "seed": 7}


def test_a_save_that_was_killed_is_no_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    temporary = checkpoints.begin(tmp_path, 3)
    (temporary / "model.bin").write_text("half")
    assert checkpoints.find_checkpoints(tmp_path) == []
    make(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_a_folder_without_manifest_or_with_missing_or_short_files_does_not_count(tmp_path: Path) -> None:
    (make(tmp_path, 1) / checkpoints.MANIFEST).unlink()
    (make(tmp_path, 2) / "model.bin").unlink()
    (make(tmp_path, 3) / "sub" / "state.bin").write_text("")
    (make(tmp_path, 4) / checkpoints.MANIFEST).write_text("{")
    good = make(tmp_path, 5)
    assert checkpoints.find_checkpoints(tmp_path) == [(5, good)]


def test_changed_content_of_equal_size_is_found_on_loading(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    (path / "model.bin").write_text("wEights")
    assert checkpoints.problem_with(path) is None
    assert checkpoints.problem_with(path, check_hashes=True) == "model.bin does not have the content that was saved"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    make(tmp_path, 5, "first")
    path = make(tmp_path, 5, "second")
    assert (path / "model.bin").read_text() == "second"
    assert checkpoints.problem_with(path, check_hashes=True) is None


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make(tmp_path, step)
    checkpoints.prune(tmp_path, keep=2, spare=None)
    assert [step for step, _ in checkpoints.find_checkpoints(tmp_path)] == [3, 10]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_used_is_never_deleted(tmp_path: Path) -> None:
    (make(tmp_path, 1) / checkpoints.MANIFEST).unlink()
    (make(tmp_path, 2, "first") / checkpoints.STATE).write_text("damaged")
    make(tmp_path, 2, "second")
    first, second, aside = sorted(tmp_path.iterdir())
    assert (first.name, second.name) == ("step-000001", "step-000002") and aside.name.startswith("step-000002.damaged-")
    assert [(path / "model.bin").read_text() for path in (second, aside)] == ["second", "first"]
    assert checkpoints.candidates(tmp_path) == [(1, first), (2, second)]


def test_a_busy_checkpoint_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(tmp_path, step)

    def busy(path: Path) -> NoReturn:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        checkpoints.prune(tmp_path, keep=1, spare=None, log=told.append)
        make(tmp_path, 3)
    assert "step 1 could not be removed whole" in told[0] and "the next save tries again" in told[0]
    assert [step for step, _ in checkpoints.candidates(tmp_path)] == [2, 3]
    make(tmp_path, 4)
    assert not list(tmp_path.glob(".tmp-*"))


def make_scored(folder: Path, step: int, *rewards: float | None) -> Path:
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
        make_scored(tmp_path, step, reward)
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
    make_scored(tmp_path, 1, 0.5)
    second = make_scored(tmp_path, 2, 0.5)
    make_scored(tmp_path, 3)
    other = {"score": {"metric": "accuracy", "mean": 1.0, "steps": 1}}
    checkpoints.commit(checkpoints.begin(tmp_path, 4), 4, other)
    for step, odd in enumerate(({"score": 3}, {"score": {"metric": "reward", "mean": "high"}}), start=5):
        checkpoints.commit(checkpoints.begin(tmp_path, step), step, odd)
    assert find_best(tmp_path, "reward") == second
    assert find_best(tmp_path, None) is None and find_best(tmp_path / "none", "reward") is None


@pytest.mark.parametrize("moment", ["before the link", "with a link half made", "before pruning"])
def test_a_killed_save_does_not_lose_the_best(moment: str, tmp_path: Path) -> None:
    make_scored(tmp_path, 1, 0.9)
    keep(tmp_path, 1)
    make_scored(tmp_path, 2, 0.95)
    if moment == "with a link half made":
        (tmp_path / ".tmp-best").symlink_to("step-000002")
    if moment == "before pruning":
        point_to_best(tmp_path, "reward")
    assert checkpoints.problem_with(tmp_path / "best") is None
    # The run goes on.
    make_scored(tmp_path, 3, 0.1)
    assert keep(tmp_path, 1) == ["best", "step-000002", "step-000003"]
    assert os.readlink(tmp_path / "best") == "step-000002"


def test_a_damaged_best_is_no_best(tmp_path: Path) -> None:
    damaged = make_scored(tmp_path, 1, 0.9)
    (damaged / checkpoints.STATE).unlink()
    second = make_scored(tmp_path, 2, 0.1)
    assert point_to_best(tmp_path, "reward") == second


def test_a_link_that_leads_nowhere_is_removed_and_what_is_no_link_is_left(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("step-000009")
    assert point_to_best(tmp_path, "reward") is None and not os.path.lexists(tmp_path / "best")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").write_text("mine")
    path, told = make_scored(tmp_path, 1, 0.5), []
    assert point_to_best(tmp_path, "reward", told.append) == path
    assert "could not be made to lead to" in told[0] and (tmp_path / "best" / "notes.txt").exists()

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


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    """One is found and read; a killed save, missing or short files and a damaged manifest do not count."""
    (make(tmp_path, 1) / checkpoints.MANIFEST).unlink()
    (make(tmp_path, 2) / "model.bin").unlink()
    (make(tmp_path, 3) / "sub" / "state.bin").write_text("")
    (make(tmp_path, 4) / checkpoints.MANIFEST).write_text("{")
    good = make(tmp_path, 5)
    (checkpoints.begin(tmp_path, 6) / "model.bin").write_text("half")
    assert checkpoints.find_checkpoints(tmp_path) == [(5, good)]
    assert checkpoints.read_state(good) == {"step": 5, "seed": 7}
    make(tmp_path, 7)
    assert not list(tmp_path.glob(".tmp-*")), "leftovers of killed saves are removed"


def test_changed_content_of_equal_size_is_found_on_loading(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    (path / "model.bin").write_text("wEights")
    assert checkpoints.problem_with(path) is None
    assert checkpoints.problem_with(path, check_hashes=True) == "model.bin does not have the content that was saved"


def test_saving_a_step_again_replaces_it_and_deletes_nothing(tmp_path: Path) -> None:
    (make(tmp_path, 1) / checkpoints.MANIFEST).unlink()
    (make(tmp_path, 2, "first") / checkpoints.STATE).write_text("damaged")
    assert checkpoints.problem_with(make(tmp_path, 2, "second"), check_hashes=True) is None
    first, second, aside = sorted(tmp_path.iterdir())
    assert (first.name, second.name) == ("step-000001", "step-000002") and aside.name.startswith("step-000002.damaged-")
    assert [(path / "model.bin").read_text() for path in (second, aside)] == ["second", "first"]
    assert checkpoints.candidates(tmp_path) == [(1, first), (2, second)]


def test_a_busy_checkpoint_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(tmp_path, step)

    def busy(path: Path) -> NoReturn:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    lines: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        checkpoints.prune(tmp_path, keep=1, spare=None, log=lines.append)
        make(tmp_path, 3)
    assert "step 1 could not be removed whole" in lines[0] and "the next save tries again" in lines[0]
    assert [step for step, _ in checkpoints.candidates(tmp_path)] == [2, 3]
    make(tmp_path, 4)
    assert not list(tmp_path.glob(".tmp-*"))


def make_scored(folder: Path, step: int, *rewards: float | None) -> Path:
    score = RunningScore("reward")
    for reward in rewards:
        score.add({"reward": reward, "loss": 9.0})
    return checkpoints.commit(checkpoints.begin(folder, step), step, score.entry())


def prune(folder: Path, newest: int) -> list[str]:
    checkpoints.prune(folder, newest, point_to_best(folder, "reward"))
    return sorted(path.name for path in folder.iterdir())


def test_the_score_is_the_mean_since_the_last_checkpoint() -> None:
    score, none = RunningScore("reward"), RunningScore(None)
    assert score.entry() == {}
    for value in (0.25, None, 0.75):
        score.add({"reward": value})
    score.add({"loss": 1.0})
    assert score.entry() == {"score": {"metric": "reward", "mean": 0.5, "steps": 2}}
    score.reset()
    none.add({"reward": 1.0})
    assert score.entry() == none.entry() == {}


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    kept = []
    for step, reward in enumerate((0.1, 0.9, 0.2, 0.3, 0.95, 0.4), start=1):
        make_scored(tmp_path, step, reward)
        kept.append("".join(name[-1] for name in prune(tmp_path, 2)))  # of "best" and of each number
    assert kept == ["t1", "t12", "t23", "t234", "t45", "t56"]
    assert os.readlink(tmp_path / "best") == "step-000005"
    assert checkpoints.problem_with(tmp_path / "best", check_hashes=True) is None
    assert [step for step, _ in checkpoints.candidates(tmp_path)] == [5, 6], "the link is no checkpoint"


def test_of_equals_the_newest_and_only_by_the_same_metric(tmp_path: Path) -> None:
    make_scored(tmp_path, 1, 0.5)
    second = make_scored(tmp_path, 2, 0.5)
    make_scored(tmp_path, 3)
    (make_scored(tmp_path, 4, 0.9) / checkpoints.STATE).unlink()
    other = {"score": {"metric": "accuracy", "mean": 1.0, "steps": 1}}
    for step, odd in enumerate((other, {"score": 3}, {"score": {"metric": "reward", "mean": "high"}}), start=5):
        checkpoints.commit(checkpoints.begin(tmp_path, step), step, odd)
    assert find_best(tmp_path, "reward") == second
    assert find_best(tmp_path, None) is None and find_best(tmp_path / "none", "reward") is None


@pytest.mark.parametrize("moment", ["before the link", "with a link half made", "before pruning"])
def test_a_killed_save_does_not_lose_the_best(moment: str, tmp_path: Path) -> None:
    make_scored(tmp_path, 1, 0.9)
    prune(tmp_path, 1)
    make_scored(tmp_path, 2, 0.95)
    if moment == "with a link half made":
        (tmp_path / ".tmp-best").symlink_to("step-000002")
    if moment == "before pruning":
        point_to_best(tmp_path, "reward")
    assert checkpoints.problem_with(tmp_path / "best") is None
    make_scored(tmp_path, 3, 0.1)
    assert prune(tmp_path, 1) == ["best", "step-000002", "step-000003"]
    assert os.readlink(tmp_path / "best") == "step-000002"


def test_a_dangling_link_is_removed_and_what_is_no_link_is_left(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("step-000009")
    assert point_to_best(tmp_path, "reward") is None and not os.path.lexists(tmp_path / "best")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").write_text("mine")
    path, lines = make_scored(tmp_path, 1, 0.5), []
    assert point_to_best(tmp_path, "reward", lines.append) == path
    assert "could not be made to lead to" in lines[0] and (tmp_path / "best" / "notes.txt").exists()

"""Only complete checkpoints count, and damage is found before anything is loaded."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from vlm_pg.training import checkpoints


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

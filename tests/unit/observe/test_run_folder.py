"""A new run gets an empty folder, and nothing that was there before is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.observe.builders import make_run
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.run_folder import RunFolder


def test_a_new_run_moves_an_earlier_one_aside_and_says_so(tmp_path: Path) -> None:
    earlier = make_run(tmp_path / "run")
    content = {path.name: path.read_bytes() for path in earlier.path.iterdir() if path.is_file()}
    said: list[str] = []
    folder = RunFolder.create(tmp_path / "run", resume=False, announce=said.append)
    aside = [path for path in tmp_path.iterdir() if path.name.startswith("run.old-")]
    assert [path.name for path in folder.path.iterdir()] == ["checkpoints"]
    assert {path.name: path.read_bytes() for path in aside[0].iterdir() if path.is_file()} == content
    assert len(said) == 1
    assert str(aside[0]) in said[0]
    assert "resume=auto" in said[0]


def test_two_runs_moved_within_a_second_do_not_collide(tmp_path: Path) -> None:
    for _ in range(4):
        make_run(tmp_path / "run", steps=1)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("run.old-")]) == 3


def test_resume_keeps_the_folder_and_clears_what_a_killed_write_left(tmp_path: Path) -> None:
    earlier = make_run(tmp_path / "run")
    before = earlier.metrics.read_bytes()
    (earlier.path / ".summary.json.abc.tmp").write_text("{")
    folder = RunFolder.create(tmp_path / "run", resume=True)
    assert folder.metrics.read_bytes() == before
    assert not list(folder.path.glob(".*.tmp"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_other_things_is_refused_untouched(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        ConfigError, match=r"(?s)thesis\.tex.*Only an empty folder or an earlier run.*Point run\.dir at"
    ):
        RunFolder.create(tmp_path, resume=resume)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_current_directory_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for path in (Path("."), Path(".."), tmp_path):
        with pytest.raises(
            ConfigError, match=r"current directory or one above.*needs a folder of its own.*Point run\.dir"
        ):
            RunFolder.create(path, resume=False)
    (inner / "file").write_text("")
    with pytest.raises(ConfigError, match=r"is a file\. A run needs a folder\. Point run\.dir"):
        RunFolder.create(inner / "file", resume=False)


def test_summary_refuses_nan_and_names_its_key(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    with pytest.raises(
        VlmPgError, match=r"'eval_after\.sets\.seen\.accuracy' is not a finite.*finite numbers and null.*write null"
    ):
        folder.write_summary({"eval_after": {"sets": {"seen": {"accuracy": float("nan")}}}})
    assert not folder.summary.exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_bytes_atomic(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_summary_is_readable_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    folder.write_summary({"steps": 3, "name": "größe"})
    assert json.loads(folder.summary.read_text("utf-8")) == {"steps": 3, "name": "größe"}

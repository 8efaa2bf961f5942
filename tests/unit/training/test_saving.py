"""Which checkpoint a run goes on from, and what it refuses to go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_pg.config import RunConfig
from vlm_pg.errors import CheckpointError
from vlm_pg.training import checkpoints
from vlm_pg.training.saving import abandon_others, changed_settings, checkpoint_settings, checkpoint_to_resume


def config(resume: str, **model: object) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"resume": resume}, "model": {"path": "m", **model}, "data": {}, "training": {"steps": 9}}
    )


def make(folder: Path, step: int, content: str = "weights") -> Path:
    temporary = checkpoints.begin(folder, step)
    (temporary / "model.bin").write_text(content)
    return checkpoints.commit(temporary, step, {"settings": checkpoint_settings(config("never"))})


def test_never_and_nothing_to_resume(tmp_path: Path) -> None:
    make(tmp_path, 3)
    assert checkpoint_to_resume(config("never"), tmp_path, print) is None
    assert checkpoint_to_resume(config("auto"), tmp_path / "empty", print) is None


def test_auto_takes_the_newest_whole_one_and_names_the_damaged_one(tmp_path: Path) -> None:
    good, damaged = make(tmp_path, 3), make(tmp_path, 4)
    (damaged / "model.bin").write_text("wEights")
    said: list[str] = []
    assert checkpoint_to_resume(config("auto"), tmp_path, said.append) == good
    assert said == [f"{damaged} is passed over: model.bin does not have the content that was saved"]


def test_a_named_checkpoint_must_be_whole(tmp_path: Path) -> None:
    path = make(tmp_path, 3)
    assert checkpoint_to_resume(config(str(path)), tmp_path, print) == path
    (path / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"not a usable checkpoint: model\.bin is missing"):
        checkpoint_to_resume(config(str(path)), tmp_path, print)
    with pytest.raises(CheckpointError, match="which is not a folder"):
        checkpoint_to_resume(config("no/such/folder"), tmp_path, print)


def test_settings_that_decide_its_content_must_fit(tmp_path: Path) -> None:
    make(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"model\.train=\[merger, language\] \(it has \[language\]\)"):
        checkpoint_to_resume(config("auto", train=("merger", "language")), tmp_path, print)
    with pytest.raises(CheckpointError, match=r"model\.dtype=bf16 \(it has fp32\)"):
        checkpoint_to_resume(config("auto", dtype="bf16"), tmp_path, print)


def test_positions_are_not_changed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A checkpoint that does not name its rule was written when transformers' was the only one."""
    path = make(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"continued with model\.positions=transformers \(it has qwen\)\. Resume"):
        checkpoint_to_resume(config("auto", positions="transformers"), tmp_path, print)
    settings = checkpoint_settings(config("never"))
    del settings["model.positions"]
    temporary = checkpoints.begin(tmp_path, 4)
    (temporary / "model.bin").write_text("weights")
    unsaid = checkpoints.commit(temporary, 4, {"settings": settings})
    with pytest.raises(CheckpointError, match=r"continued with model\.positions=qwen \(it has transformers\)\. Resume"):
        checkpoint_to_resume(config(str(unsaid)), tmp_path, print)
    assert checkpoint_to_resume(config(str(unsaid), positions="transformers"), tmp_path, print) == unsaid
    assert checkpoint_to_resume(config(str(path)), tmp_path, print) == path


def test_resuming_from_an_earlier_one_moves_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step)
    abandon_others(tmp_path, tmp_path / "step-000002", 2, print)
    assert [step for step, _ in checkpoints.find_checkpoints(tmp_path)] == [2]
    (aside,) = tmp_path.glob("abandoned-*")
    assert sorted(path.name for path in aside.iterdir()) == ["step-000004", "step-000006"]


def test_resuming_from_elsewhere_moves_all_of_the_run_aside(tmp_path: Path) -> None:
    """A step of the same number is of another branch, and would stand for the one resumed from."""
    for step in (2, 4):
        make(tmp_path / "own", step)
    other = make(tmp_path / "own" / "abandoned-1", 2)
    told: list[str] = []
    abandon_others(tmp_path / "own", other, 2, told.append)
    assert checkpoints.candidates(tmp_path / "own") == [] and checkpoints.problem_with(other) is None
    assert "moved 2 checkpoint(s) of another branch" in told[0]


def test_changed_settings_are_named() -> None:
    assert changed_settings({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c: 2 -> 3"]

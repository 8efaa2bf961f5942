"""A run with a past is never begun anew in the same place, and what is passed over is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.unit.training.test_saving import config, make
from vlm_pg.data.digests import changed_data, data_digests
from vlm_pg.errors import CheckpointError
from vlm_pg.training import checkpoints, saving
from vlm_pg.training.saving import abandon_others, checkpoint_to_resume


def run_folder(path: Path, steps: int, every: int = 2) -> Path:
    """A run's folder with metrics of so many steps; its checkpoints lie in ``checkpoints``."""
    (path / "checkpoints").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step + 1}) + "\n" for step in range(steps)))
    (path / "config.yaml").write_text(json.dumps({"training": {"checkpoint_every": every}}))
    return path


def test_damaged_checkpoints_are_named_and_nothing_is_begun(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 4)
    for step, name in ((2, "model.bin"), (4, checkpoints.STATE)):
        (make(run / "checkpoints", step) / name).write_text("")
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"(?s)nothing in it was changed:.*step-000004.*step-000002") as caught:
        checkpoint_to_resume(config("auto"), run / "checkpoints", said.append)
    assert f"run.dir={run}-2 run.resume=never" in str(caught.value) and "model.bin has 0 bytes" in str(caught.value)
    assert [line.partition(" is passed over")[0][-11:] for line in said] == ["step-000004", "step-000002"]


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    good, cut = make(tmp_path, 3), make(tmp_path, 4)
    (cut / "model.bin").write_text("wei")
    said: list[str] = []
    assert checkpoint_to_resume(config("auto"), tmp_path, said.append) == good
    assert said == [f"{cut} is passed over: model.bin has 3 bytes instead of 7"]


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    make(tmp_path / "checkpoints", 3)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read \(Permission denied\)"):
        checkpoint_to_resume(config("auto"), tmp_path / "checkpoints", print)


@pytest.mark.parametrize(
    ("steps", "every", "refused"),
    [(0, 2, False), (2, 2, False), (3, 2, True), (3, 0, False), (1, 1, False), (2, 1, True)],
)
def test_a_run_without_a_checkpoint_begins_again_only_before_the_first_was_due(
    tmp_path: Path, steps: int, every: int, refused: bool
) -> None:
    run = run_folder(tmp_path / "run", steps, every)
    if not refused:
        assert checkpoint_to_resume(config("auto"), run / "checkpoints", print) is None
        assert len(saving.set_aside(run)) == (steps > 0)
        return
    with pytest.raises(CheckpointError, match=rf"metrics\.jsonl goes to step {steps}, with a checkpoint every {every}"):
        checkpoint_to_resume(config("auto"), run / "checkpoints", print)


def test_a_finished_run_is_not_begun_again(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 1)
    (run / "summary.json").write_text('{"finished": true}')
    with pytest.raises(CheckpointError, match=r"summary\.json says that the run is finished"):
        checkpoint_to_resume(config("auto"), run / "checkpoints", print)


def test_rollouts_alone_are_a_past_too(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 0)
    (run / "metrics.jsonl").unlink()
    (run / "rollouts.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(CheckpointError, match=r"rollouts\.jsonl has an earlier run's rollouts"):
        checkpoint_to_resume(config("auto"), run / "checkpoints", print)


def test_what_cannot_be_loaded_gives_way_to_the_one_before(tmp_path: Path) -> None:
    older, newer = make(tmp_path, 3), make(tmp_path, 4)
    said: list[str] = []
    assert checkpoint_to_resume(config("auto"), tmp_path, said.append, {newer: "it lacks weights"}) == older
    with pytest.raises(CheckpointError, match=r"(?s)step-000004: it lacks weights.*step-000003: nor this"):
        checkpoint_to_resume(config("auto"), tmp_path, said.append, {newer: "it lacks weights", older: "nor this"})
    assert said == []


def test_damaged_later_checkpoints_are_moved_aside_too(tmp_path: Path) -> None:
    """A later save of their step would replace them."""
    make(tmp_path, 2)
    (make(tmp_path, 4) / "model.bin").write_text("")
    (tmp_path / "step-000005").write_text("a file")
    abandon_others(tmp_path, tmp_path / "step-000002", 2, print)
    (aside,) = tmp_path.glob("abandoned-*")
    assert sorted(path.name for path in aside.iterdir()) == ["step-000004", "step-000005"]


def test_a_run_that_came_from_elsewhere_does_not_begin_at_its_model(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 1)
    (run / "config.yaml").write_text(
        json.dumps({"training": {"checkpoint_every": 2}, "run": {"resume": "other/step-9"}})
    )
    with pytest.raises(
        CheckpointError, match=r"went on from other/step-9.*name that one again, run\.resume=other/step-9"
    ):
        checkpoint_to_resume(config("auto"), run / "checkpoints", print)


def test_changed_data_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("1\n")
    settings = config("auto").data.model_copy(update={"train": file, "eval": {"seen": tmp_path / "none.jsonl"}})
    before = data_digests(settings)
    assert list(before) == ["data.train"] and changed_data(before, data_digests(settings)) == []
    file.write_text("2\n")
    (line,) = changed_data(before, data_digests(settings))
    assert line.startswith(f"data.train={file} has another content than when the checkpoint was written")
    assert changed_data(None, before) == changed_data({"data.train": 3}, before) == []


def test_another_number_of_usable_records_is_named(tmp_path: Path) -> None:
    """Of the same file: another version of this program refuses other records. Checkpoints of early ones do not say."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(name)
    sets = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    one = config("auto").data.model_copy(update={"train": sets["a"], "eval": {"x": sets["b"]}})
    several = one.model_copy(update={"train": sets})
    for settings, names, key in ((one, [""], "data.train"), (several, ["a", "b"], "data.train.b")):
        before = data_digests(settings, dict.fromkeys(names, 3))
        assert json.loads(json.dumps(before)) == before and changed_data(before, before) == []
        now = data_digests(settings, {**dict.fromkeys(names, 3), names[-1]: 2})
        (line,) = changed_data(before, now)
        assert line.startswith(f"{key}={sets[names[-1] or 'a']} has 2 usable records; it had 3 when the checkpoint was")
        assert changed_data(data_digests(settings), now) == changed_data(now, data_digests(settings)) == []


def test_sets_that_are_added_removed_or_renamed_are_named() -> None:
    def sets(**contents: str) -> dict[str, dict[str, str]]:
        names = {name.replace("_", "."): content for name, content in contents.items()}
        return {f"data.{name}": {"path": f"{content}.jsonl", "sha256": content} for name, content in names.items()}

    questions = "the questions of further steps, and their order, are not those the run would have had"
    before = sets(train_a="1", train_b="2", eval_x="3")
    moved = {key: entry | {"path": f"elsewhere/{entry['path']}"} for key, entry in before.items()}
    assert changed_data(before, before) == changed_data(before, moved) == changed_data({}, {}) == []
    assert changed_data(before, before | sets(train_c="4")) == [
        f"data.train.c=4.jsonl was not there when the checkpoint was written: {questions}"
    ]
    assert changed_data(before, sets(train_a="1", eval_x="3")) == [
        f"data.train.b=2.jsonl of when the checkpoint was written is not there: {questions}"
    ]
    assert changed_data(before, sets(train_a="1", train_c="2", eval_x="3")) == [
        f"data.train.c=2.jsonl was called data.train.b when the checkpoint was written: {questions}"
    ]
    assert changed_data(before, sets(train_a="1", train_b="5", eval_x="3")) == [
        "data.train.b=5.jsonl has another content than when the checkpoint was written (it was 2.jsonl): " + questions
    ]
    assert changed_data(sets(train="1"), sets(train_a="1")) == [
        f"data.train.a=1.jsonl was called data.train when the checkpoint was written: {questions}"
    ]
    # A set that becomes one of evaluation is gone from training.
    scores = "scores of before and after it are not of the same questions"
    assert changed_data(before, sets(train_a="1", eval_b="2", eval_x="3")) == [
        f"data.eval.b=2.jsonl was not there when the checkpoint was written: {scores}",
        f"data.train.b=2.jsonl of when the checkpoint was written is not there: {questions}",
    ]

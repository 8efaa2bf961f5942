"""What a run goes on from, and what it refuses to begin anew over."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.tiny import tiny_model
from vlm_pg.config import RunConfig
from vlm_pg.data.digests import changed_data, data_digests
from vlm_pg.errors import CheckpointError
from vlm_pg.training import checkpoints, saving
from vlm_pg.training.saving import abandon_others, changed_settings, checkpoint_settings, checkpoint_to_resume


def config(resume: str, **model: object) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"resume": resume}, "model": {"path": "m"} | model, "data": {}, "training": {"steps": 9}}
    )


def write_contents(checkpoint: Path) -> None:
    (checkpoint / "optimizer").mkdir()
    (checkpoint / "optimizer" / "states.json").write_text('{"updates": 3, "masters": false, "weights": {"w": [2, 3]}}')


def make(folder: Path, step: int, content: str = "weights") -> Path:
    temporary = checkpoints.begin(folder, step)
    (temporary / "model.bin").write_text(content)
    write_contents(temporary)
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


def test_how_it_is_computed_does_not_matter(tmp_path: Path) -> None:
    path = make(tmp_path, 3)
    sections = config("auto").model_dump()
    sections["training"] |= {"engine": "deepspeed", "deepspeed_config": "ds.json", "sequence_parallel": 2}
    assert checkpoint_to_resume(RunConfig.model_validate(sections), tmp_path, print) == path


def test_states_that_do_not_go_by_names_are_passed_over(tmp_path: Path) -> None:
    """As of DeepSpeed's own checkpoints."""
    temporary = checkpoints.begin(tmp_path, 3)
    (temporary / "deepspeed").mkdir()
    path = checkpoints.commit(temporary, 3, {"settings": checkpoint_settings(config("never"))})
    with pytest.raises(CheckpointError, match=r"has no optimizer/states\.json: another release or another program"):
        checkpoint_to_resume(config(str(path)), tmp_path, print)


def of_model(folder: Path, step: int, model: Path, lora: dict[str, object] | None = None) -> Path:
    """A checkpoint without weights: what is asked before anything is loaded is in the small files."""
    temporary = checkpoints.begin(folder, step)
    if lora is None:
        shutil.copy(model / "config.json", temporary)
    else:
        base = {"base_model_name_or_path": str(model)}
        (temporary / "adapter_config.json").write_text(json.dumps(base))
    write_contents(temporary)
    settings = checkpoint_settings(config("never", path=str(model), lora=lora))
    return checkpoints.commit(temporary, step, {"settings": settings})


def save_config(folder: Path, family: str = "qwen2_5_vl", **changes: int) -> Path:
    tiny_model(family, **changes).config.save_pretrained(folder)
    return folder


def test_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model, run = save_config(tmp_path / "model"), tmp_path / "run"
    path = of_model(run, 3, model)
    assert checkpoint_to_resume(config("auto", path=str(model)), run, print) == path
    for other, words in (
        (save_config(tmp_path / "deeper", num_hidden_layers=5), r"it has .*num_hidden_layers \d instead of 5"),
        (save_config(tmp_path / "wider", hidden_size=128), r"it has .*hidden_size \d+ instead of 128"),
        (save_config(tmp_path / "heads", num_attention_heads=8), r"num_attention_heads \d instead of 8"),
        (save_config(tmp_path / "kin", "qwen2_vl"), "model_type qwen2_5_vl instead of qwen2_vl"),
        (save_config(tmp_path / "text", "qwen2"), "model_type qwen2_5_vl instead of qwen2"),
    ):
        with pytest.raises(CheckpointError, match=rf"is of another model than model\.path={other}.*{words}"):
            checkpoint_to_resume(config("auto", path=str(other)), run, print)


def test_an_adapter_and_a_whole_model_do_not_go_on_from_each_other(tmp_path: Path) -> None:
    model, lora = save_config(tmp_path / "model"), {"rank": 4, "alpha": 8}
    whole, adapter = of_model(tmp_path / "whole", 3, model), of_model(tmp_path / "lora", 3, model, lora)
    assert checkpoint_to_resume(config(str(adapter), path=str(model), lora=lora), tmp_path, print) == adapter
    for resume, now, words in (
        (whole, lora, r"model\.lora=\{'rank': 4.* \(it has None\)"),
        (adapter, None, r"model\.lora=None \(it has \{'rank': 4"),
        (adapter, lora | {"rank": 8}, r"model\.lora=\{'rank': 8.* \(it has \{'rank': 4"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint_to_resume(config(str(resume), path=str(model), lora=now), tmp_path, print)
    deeper = save_config(tmp_path / "deeper", num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"another model than model\.path=.*num_hidden_layers"):
        checkpoint_to_resume(config(str(adapter), path=str(deeper), lora=lora), tmp_path, print)


def test_positions_are_not_changed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A checkpoint that does not name its rule was written when transformers' was the only one."""
    path = make(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"continued with model\.positions=transformers \(it has qwen\)\. Resume"):
        checkpoint_to_resume(config("auto", positions="transformers"), tmp_path, print)
    settings = checkpoint_settings(config("never"))
    del settings["model.positions"]
    temporary = checkpoints.begin(tmp_path, 4)
    (temporary / "model.bin").write_text("weights")
    write_contents(temporary)
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

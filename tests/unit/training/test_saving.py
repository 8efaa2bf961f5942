"""The checkpoint a run resumes from, and runs that must not begin anew."""

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


def make(folder: Path, step: int, settings: dict[str, Any] | None = None, files: tuple[Path, ...] = ()) -> Path:
    """A checkpoint without weights: checks before loading read the small files alone."""
    temporary = checkpoints.begin(folder, step)
    (temporary / "model.bin").write_text("weights")
    for file in files:
        shutil.copy(file, temporary)
    (temporary / "optimizer").mkdir()
    (temporary / "optimizer" / "states.json").write_text('{"updates": 3, "masters": false, "weights": {"w": [2, 3]}}')
    return checkpoints.commit(temporary, step, {"settings": settings or checkpoint_settings(config("never"))})


def resumed(folder: Path, resume: str | Path = "auto", lines: list[str] | None = None, **model: object) -> Path | None:
    return checkpoint_to_resume(config(str(resume), **model), folder, [].append if lines is None else lines.append)


def refused(folder: Path, words: str, resume: str | Path = "auto", **model: object) -> str:
    with pytest.raises(CheckpointError, match=words) as caught:
        resumed(folder, resume, **model)
    return str(caught.value)


def test_never_and_nothing_to_resume(tmp_path: Path) -> None:
    make(tmp_path, 3)
    assert resumed(tmp_path, "never") is None and resumed(tmp_path / "empty") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [("wEights", "model.bin does not have the content that was saved"), ("wei", "model.bin has 3 bytes instead of 7")],
)
def test_auto_takes_the_newest_whole_one_and_names_the_damaged_one(content: str, words: str, tmp_path: Path) -> None:
    good, damaged, lines = make(tmp_path, 3), make(tmp_path, 4), []
    (damaged / "model.bin").write_text(content)
    assert resumed(tmp_path, lines=lines) == good
    assert lines == [f"{damaged} is passed over: {words}"]


def test_a_named_checkpoint_must_be_whole(tmp_path: Path) -> None:
    path = make(tmp_path, 3)
    assert resumed(tmp_path, path) == path
    (path / "model.bin").unlink()
    refused(tmp_path, r"not a usable checkpoint: model\.bin is missing", path)
    refused(tmp_path, "which is not a folder", "no/such/folder")


def test_settings_that_determine_its_content_must_fit(tmp_path: Path) -> None:
    """But not those of how it is computed."""
    path = make(tmp_path, 3)
    refused(tmp_path, r"model\.train=\[merger, language\] \(it has \[language\]\)", train=("merger", "language"))
    refused(tmp_path, r"model\.dtype=bf16 \(it has fp32\)", dtype="bf16")
    sections = config("auto").model_dump()
    sections["training"] |= {"engine": "deepspeed", "deepspeed_config": "ds.json", "sequence_parallel": 2}
    assert checkpoint_to_resume(RunConfig.model_validate(sections), tmp_path, print) == path


def test_states_of_another_program_are_refused(tmp_path: Path) -> None:
    """As of DeepSpeed's own checkpoints."""
    temporary = checkpoints.begin(tmp_path, 3)
    (temporary / "deepspeed").mkdir()
    path = checkpoints.commit(temporary, 3, {"settings": checkpoint_settings(config("never"))})
    refused(tmp_path, r"has no optimizer/states\.json: another release or another program", path)


def save_config(folder: Path, family: str = "qwen2_5_vl", **changes: int) -> Path:
    tiny_model(family, **changes).config.save_pretrained(folder)
    return folder


def of_model(folder: Path, model: Path, lora: dict[str, object] | None = None) -> Path:
    file = model / "config.json"
    if lora is not None:
        file = model / "adapter_config.json"
        file.write_text(json.dumps({"base_model_name_or_path": str(model)}))
    return make(folder, 3, checkpoint_settings(config("never", path=str(model), lora=lora)), (file,))


def test_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model, run = save_config(tmp_path / "model"), tmp_path / "run"
    assert of_model(run, model) == resumed(run, path=str(model))
    for other, words in (
        (save_config(tmp_path / "deeper", num_hidden_layers=5), r"it has .*num_hidden_layers \d instead of 5"),
        (save_config(tmp_path / "heads", num_attention_heads=8), r"num_attention_heads \d instead of 8"),
        (save_config(tmp_path / "text", "qwen2"), "model_type qwen2_5_vl instead of qwen2"),
    ):
        refused(run, rf"is of another model than model\.path={other}.*{words}", path=str(other))


def test_an_adapter_and_a_whole_model_do_not_resume_from_each_other(tmp_path: Path) -> None:
    model, lora = save_config(tmp_path / "model"), {"rank": 4, "alpha": 8}
    whole, adapter = of_model(tmp_path / "whole", model), of_model(tmp_path / "lora", model, lora)
    assert resumed(tmp_path, adapter, path=str(model), lora=lora) == adapter
    for resume, now, words in (
        (whole, lora, r"model\.lora=\{'rank': 4.* \(it has None\)"),
        (adapter, None, r"model\.lora=None \(it has \{'rank': 4"),
        (adapter, lora | {"rank": 8}, r"model\.lora=\{'rank': 8.* \(it has \{'rank': 4"),
    ):
        refused(tmp_path, words, resume, path=str(model), lora=now)
    deeper = str(save_config(tmp_path / "deeper", num_hidden_layers=5))
    refused(tmp_path, r"another model than model\.path=.*num_hidden_layers", adapter, path=deeper, lora=lora)


def test_positions_are_not_changed_within_a_run(tmp_path: Path) -> None:
    """A checkpoint that does not name its rule was written when transformers' was the only one."""
    path = make(tmp_path, 3)
    words = r"continued with model\.positions=transformers \(it has qwen\)\. Resume"
    refused(tmp_path, words, positions="transformers")
    settings = checkpoint_settings(config("never"))
    del settings["model.positions"]
    old = make(tmp_path, 4, settings)
    refused(tmp_path, r"continued with model\.positions=qwen \(it has transformers\)\. Resume", old)
    assert resumed(tmp_path, old, positions="transformers") == old and resumed(tmp_path, path) == path


def test_resuming_from_an_earlier_one_moves_the_later_ones_aside(tmp_path: Path) -> None:
    """Damaged ones too: a later save of their step would replace them."""
    for step in (2, 4, 6):
        make(tmp_path, step)
    (tmp_path / "step-000004" / "model.bin").write_text("")
    (tmp_path / "step-000005").write_text("a file")
    abandon_others(tmp_path, tmp_path / "step-000002", 2, print)
    assert [step for step, _ in checkpoints.candidates(tmp_path)] == [2]
    (aside,) = tmp_path.glob("abandoned-*")
    assert sorted(path.name for path in aside.iterdir()) == ["step-000004", "step-000005", "step-000006"]


def test_resuming_from_elsewhere_moves_all_of_the_run_aside(tmp_path: Path) -> None:
    """A step of the same number is of another branch, and would stand for the one resumed from."""
    for step in (2, 4):
        make(tmp_path / "own", step)
    other, lines = make(tmp_path / "own" / "abandoned-1", 2), []
    abandon_others(tmp_path / "own", other, 2, lines.append)
    assert checkpoints.candidates(tmp_path / "own") == [] and checkpoints.problem_with(other) is None
    assert "moved 2 checkpoint(s) of another branch" in lines[0]


def test_changed_settings_are_named() -> None:
    assert changed_settings({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c: 2 -> 3"]


def run_folder(path: Path, steps: int, **sections: dict[str, Any]) -> Path:
    """A run's folder with metrics of so many steps and a checkpoint due every second step."""
    (path / "checkpoints").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step + 1}) + "\n" for step in range(steps)))
    (path / "config.yaml").write_text(json.dumps({"training": {"checkpoint_every": 2}} | sections))
    return path


def test_damaged_checkpoints_are_named_and_nothing_is_begun(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 4)
    for step, name in ((2, "model.bin"), (4, checkpoints.STATE)):
        (make(run / "checkpoints", step) / name).write_text("")
    message = refused(run / "checkpoints", r"(?s)nothing in it was changed:.*step-000004.*step-000002")
    assert f"run.dir={run}-2 run.resume=never" in message and "model.bin has 0 bytes" in message


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    make(tmp_path / "checkpoints", 3)
    monkeypatch.setattr(os, "scandir", denied)
    refused(tmp_path / "checkpoints", r"checkpoints cannot be read \(Permission denied\)")


@pytest.mark.parametrize(("steps", "every", "is_refused"), [(0, 2, False), (2, 2, False), (3, 2, True), (3, 0, False)])
def test_a_run_without_a_checkpoint_begins_again_only_before_the_first_was_due(
    tmp_path: Path, steps: int, every: int, is_refused: bool
) -> None:
    run = run_folder(tmp_path / "run", steps, training={"checkpoint_every": every})
    if is_refused:
        refused(run / "checkpoints", rf"metrics\.jsonl goes to step {steps}, with a checkpoint every {every}")
    else:
        assert resumed(run / "checkpoints") is None and len(saving.archive_logs(run)) == (steps > 0)


def test_a_run_without_checkpoints_but_with_a_past_is_not_begun_again(tmp_path: Path) -> None:
    finished, sampled = run_folder(tmp_path / "finished", 1), run_folder(tmp_path / "sampled", 0)
    (finished / "summary.json").write_text('{"finished": true}')
    refused(finished / "checkpoints", r"summary\.json says that the run is finished")
    (sampled / "metrics.jsonl").unlink()
    (sampled / "rollouts.jsonl").write_text('{"step": 1}\n')
    refused(sampled / "checkpoints", r"rollouts\.jsonl has an earlier run's rollouts")
    elsewhere = run_folder(tmp_path / "elsewhere", 1, run={"resume": "other/step-9"})
    words = r"went on from other/step-9.*name that one again, run\.resume=other/step-9"
    refused(elsewhere / "checkpoints", words)


def test_what_cannot_be_loaded_gives_way_to_the_one_before(tmp_path: Path) -> None:
    older, newer, lines = make(tmp_path, 3), make(tmp_path, 4), []
    unloadable = {newer: "it lacks weights"}
    assert checkpoint_to_resume(config("auto"), tmp_path, lines.append, unloadable) == older
    with pytest.raises(CheckpointError, match=r"(?s)step-000004: it lacks weights.*step-000003: nor this"):
        checkpoint_to_resume(config("auto"), tmp_path, lines.append, unloadable | {older: "nor this"})
    assert lines == []


def test_changed_data_is_named(tmp_path: Path) -> None:
    """Another content, and another number of usable records of the same file: another version refuses other records."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(name)
    sets = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    one = config("auto").data.model_copy(update={"train": sets["a"], "eval": {"seen": tmp_path / "none.jsonl"}})
    several = one.model_copy(update={"train": sets})
    for settings, names, key in ((one, [""], "data.train"), (several, ["a", "b"], "data.train.b")):
        before = data_digests(settings, dict.fromkeys(names, 3))
        assert json.loads(json.dumps(before)) == before and changed_data(before, before) == []
        now = data_digests(settings, {**dict.fromkeys(names, 3), names[-1]: 2})
        (line,) = changed_data(before, now)
        assert line.startswith(f"{key}={sets[names[-1] or 'a']} has 2 usable records; it had 3 when the checkpoint was")
        assert changed_data(data_digests(settings), now) == changed_data(now, data_digests(settings)) == []
    before = data_digests(one)
    sets["a"].write_text("2\n")
    (line,) = changed_data(before, data_digests(one))
    assert line.startswith(f"data.train={sets['a']} has another content than when the checkpoint was written")
    assert changed_data(None, before) == changed_data({"data.train": 3}, before) == []


def test_sets_that_are_added_removed_or_renamed_are_named() -> None:
    def sets(**contents: str) -> dict[str, dict[str, str]]:
        names = {name.replace("_", "."): content for name, content in contents.items()}
        return {f"data.{name}": {"path": f"{content}.jsonl", "sha256": content} for name, content in names.items()}

    questions = "the questions of further steps, and their order, are not those the run would have had"
    scores = "scores of before and after it are not of the same questions"
    before = sets(train_a="1", train_b="2", eval_x="3")
    moved = {key: entry | {"path": f"elsewhere/{entry['path']}"} for key, entry in before.items()}
    assert changed_data(before, before) == changed_data(before, moved) == changed_data({}, {}) == []
    added = "data.train.c=4.jsonl was not there when the checkpoint was written: "
    removed = "data.train.b=2.jsonl of when the checkpoint was written is not there: "
    renamed = "data.train.c=2.jsonl was called data.train.b when the checkpoint was written: "
    replaced = "data.train.b=5.jsonl has another content than when the checkpoint was written (it was 2.jsonl): "
    became_eval = "data.eval.b=2.jsonl was not there when the checkpoint was written: "
    for now, lines in (
        (before | sets(train_c="4"), [added + questions]),
        (sets(train_a="1", eval_x="3"), [removed + questions]),
        (sets(train_a="1", train_c="2", eval_x="3"), [renamed + questions]),
        (sets(train_a="1", train_b="5", eval_x="3"), [replaced + questions]),
        (sets(train_a="1", eval_b="2", eval_x="3"), [became_eval + scores, removed + questions]),
    ):
        assert changed_data(before, now) == lines
    one = "data.train.a=1.jsonl was called data.train when the checkpoint was written: "
    assert changed_data(sets(train="1"), sets(train_a="1")) == [one + questions]

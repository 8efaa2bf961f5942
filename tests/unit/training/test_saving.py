"""Which checkpoint a run goes on from, and what it refuses to go on from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.tiny import tiny_model
from vlm_pg.config import RunConfig
from vlm_pg.errors import CheckpointError
from vlm_pg.training import checkpoints
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

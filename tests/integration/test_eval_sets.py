"""``vlm-pg eval`` through its command: which sets it measures, what its exit code says, and data that is all bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.short_run import short_run, train_here
from vlm_pg.cli import main

pytestmark = pytest.mark.matrix


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sections = {"eval": {"before": False, "after": False}}
    config = short_run(tmp_path, **sections, data={"media_root": str(tmp_path)})
    for name, path in (("clips", "gone.mp4"), ("pictures", "gone.png")):
        kind = "video" if name == "clips" else "image"
        record = {"problem_id": 1, "problem": "What is it?", "data_type": kind, "problem_type": "numerical"}
        (tmp_path / f"{name}.json").write_text(json.dumps([record | {"solution": "<answer>1</answer>", "path": path}]))
    return config


def evaluate(config: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, dict]:
    folder = config.parent
    code = main(["eval", "--config", str(config), f"data.eval.texts={folder}/records.json", *overrides])
    printed = capsys.readouterr()
    return code, printed.out + printed.err, json.loads((folder / "eval-model" / "result.json").read_text())


def test_the_sets_asked_for_are_measured_and_no_others(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [f"data.eval.mine={config.parent}/records.json", "eval.headline_set=texts"]
    code, _, result = evaluate(config, capsys, *both)
    assert code == 0 and list(result["sets"]) == ["texts", "mine"] and result["headline_set"] == "texts"
    code, printed, result = evaluate(config, capsys, *both, "eval.sets=[mine]")
    assert code == 0 and list(result["sets"]) == ["mine"] and result["headline_set"] == "mine"
    assert "eval.headline_set: texts is left out by eval.sets=['mine']" in printed


def test_controls_need_no_names_of_sets_and_say_where_they_do_not_run(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"data.eval.clips={config.parent}/clips.json", "eval.controls=[frames_shuffled]"]
    code, printed, result = evaluate(config, capsys, *overrides, "data.max_bad_share=1")
    assert list(result["sets"]) == ["texts", "clips", "clips (frames_shuffled)"]
    assert "eval.controls: not run on texts, which has no video" in printed
    assert code == 2 and "No question of clips, clips (frames_shuffled) could be scored" in printed


@pytest.mark.parametrize("name", ["clips", "pictures"])
def test_an_evaluation_without_a_figure_is_no_success(
    config: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, printed, result = evaluate(config, capsys, f"data.eval.{name}={config.parent}/{name}.json")
    assert code == 2 and f"No question of {name} could be scored" in printed and "bad_samples.jsonl" in printed
    assert result["sets"]["texts"]["n"] == 6 and result["sets"][name]["accuracy"] is None


def test_data_that_is_all_bad_ends_the_run_when_all_of_it_was_tried(config: Path) -> None:
    one = "training.prompts_per_step=1"
    ended = train_here(
        config, f"data.train={config.parent}/clips.json", "training.steps=50", "data.max_bad_share=1", one
    )
    assert ended.code == 2 and "No question of steps 1 to 1 could be used, so nothing was trained" in ended.printed

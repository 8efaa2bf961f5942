"""Folders of results: their names, and ``vlm-pg score`` into one that is not empty overwrites nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import write_config
from vlm_pg.cli import main
from vlm_pg.config import load_config
from vlm_pg.eval.main import result_folder
from vlm_pg.observe.run_lock import LOCK, RunLock


def scored(folder: Path, text: str, code: int = 0) -> None:
    """One question, whose gold answer is 2, and an output with this text, in the folder that is written to."""
    record = {"problem_id": "q", "problem": "1 + 1?", "data_type": "text", "problem_type": "numerical"}
    (folder / "set.json").write_text(json.dumps([record | {"solution": "<answer>2</answer>"}]))
    (folder / "outputs.json").write_text(json.dumps({"q": text}))
    arguments = ["score", str(folder / "set.json"), str(folder / "outputs.json"), "--out", str(folder)]
    assert main(arguments) == code


def accuracy(folder: Path) -> float:
    return json.loads((folder / "result.json").read_text())["sets"]["outputs"]["accuracy"]


def test_an_earlier_scoring_is_moved_aside_and_the_user_s_files_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    scored(folder, "The answer is 2.")
    assert "moved it to" not in capsys.readouterr().out
    scored(folder, "The answer is 3.")
    assert f"{folder} holds an earlier evaluation: moved it to {tmp_path}/here.old-" in capsys.readouterr().out
    assert accuracy(folder) == 0.0
    [aside] = tmp_path.glob("here.old-*")
    assert accuracy(aside) == 1.0
    assert sorted(path.name for path in aside.iterdir()) == ["answers_outputs.jsonl", "report.html", "result.json"]
    assert "The answer is 2." in (aside / "answers_outputs.jsonl").read_text()
    assert (folder / "set.json").is_file() and (folder / "outputs.json").is_file()
    assert not (folder / LOCK).exists()


def test_a_folder_that_somebody_writes_to_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = RunLock.take(tmp_path, print)
    try:
        scored(tmp_path, "2", code=2)
    finally:
        lock.release()
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("name", ["answers_outputs.jsonl", "answers_of_mine.jsonl", "judged_by_me.jsonl"])
def test_outputs_under_the_name_of_a_result_are_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be overwritten by their own scores, or moved aside with those of an earlier scoring."""
    scored(tmp_path, "2")
    outputs = tmp_path / name
    outputs.write_text(json.dumps({"id": "q", "output": "The answer is 3."}) + "\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["score", str(tmp_path / "set.json"), str(outputs), "--out", str(tmp_path)]) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "Give another folder with --out, or another name to the file" in " ".join(capsys.readouterr().err.split())


SUITE = {"data": {"eval": {"a": "a.jsonl"}}, "eval": {"protocols": {"a": "video_mme/official"}}}


def folder_of(tmp_path: Path, checkpoint: str, run: dict[str, str], **sections: object) -> str:
    base = {"model": {"path": "m"}, "training": {"steps": 1}}
    path = write_config(tmp_path / "suite.yaml", base | SUITE | sections | {"run": run})
    return str(result_folder(load_config(path), Path(checkpoint)))


def test_results_of_other_runs_suites_and_sampling_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by a suite of protocols, and by sampling settings where there is a set without one."""
    monkeypatch.chdir(tmp_path)
    checkpoint = "runs/{}/checkpoints/step-000100"
    for run in ("one", "two"):
        Path(checkpoint.format(run)).mkdir(parents=True)
        Path(f"runs/{run}/config.yaml").write_text("")
        assert folder_of(tmp_path, checkpoint.format(run), {"name": "suite"}) == f"runs/{run}/eval-step-000100-suite"
    assert folder_of(tmp_path, checkpoint.format("one"), {"name": "one"}) == "runs/one/eval-step-000100"
    for name in ("frames_16", "frames_32"):
        assert folder_of(tmp_path, "models/m", {"name": name}) == f"runs/eval-m-{name}"
    without: dict[str, object] = {"data": SUITE["data"], "eval": {"temperature": 0.0}}
    assert folder_of(tmp_path, "models/m", {"name": "plain"}, **without) == "runs/eval-m"
    without["eval"] = {"temperature": 0.5, "num_generations": 4}
    assert folder_of(tmp_path, "models/m", {"name": "plain"}, **without) == "runs/eval-m-n4-t0.5"

"""Which folder an evaluation's results lie in, and folders that do not compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import write_config
from vlm_pg.config import load_config
from vlm_pg.eval.figure_lines import comparison_lines
from vlm_pg.eval.main import result_folder

SUITE = {"data": {"eval": {"a": "a.jsonl"}}, "eval": {"protocols": {"a": "video_mme/official"}}}


def folder_of(tmp_path: Path, checkpoint: str, run: dict[str, str], **sections: object) -> str:
    base = {"model": {"path": "m"}, "training": {"steps": 1}}
    path = write_config(tmp_path / "suite.yaml", base | SUITE | sections | {"run": run})
    return str(result_folder(load_config(path), Path(checkpoint)))


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("one", "two"):
        Path(f"runs/{run}/checkpoints/step-000100").mkdir(parents=True)
        Path(f"runs/{run}/config.yaml").write_text("")


def test_one_suite_of_two_runs_checkpoints_of_one_name_is_kept_apart(tmp_path: Path) -> None:
    names = [folder_of(tmp_path, f"runs/{run}/checkpoints/step-000100", {"name": "suite"}) for run in ("one", "two")]
    assert names == [f"runs/{run}/eval-step-000100-suite" for run in ("one", "two")]


def test_two_suites_of_one_model_are_kept_apart(tmp_path: Path) -> None:
    names = [folder_of(tmp_path, "models/m", {"name": name}) for name in ("frames_16", "frames_32")]
    assert names == ["runs/eval-m-frames_16", "runs/eval-m-frames_32"]


def test_a_run_s_own_configuration_is_not_named(tmp_path: Path) -> None:
    assert folder_of(tmp_path, "runs/one/checkpoints/step-000100", {"name": "one"}) == "runs/one/eval-step-000100"
    without = {"data": {"eval": {"a": "a.jsonl"}}, "eval": {"temperature": 0.0}}
    assert folder_of(tmp_path, "models/m", {"name": "plain"}, **without) == "runs/eval-m"


def test_evaluations_without_a_common_set_are_said(tmp_path: Path) -> None:
    for name in ("rooms", "stairs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"answers_{name}.jsonl").write_text("")
    lines = comparison_lines(tmp_path / "rooms", [tmp_path / "stairs"])
    assert lines == ["stairs: no set to compare; here are rooms, there stairs"]

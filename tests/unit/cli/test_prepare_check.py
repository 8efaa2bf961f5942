"""``vlm-pg prepare NAME ... --check CONFIG``: what was prepared is looked at under a run's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.published import math, star
from tests.support.published.case import lay_out
from tests.support.runs import write_config
from vlm_pg import cli


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run on other records, which are not looked at."""
    return write_config(
        tmp_path / "run.yaml",
        {
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl")},
            "data": {
                "train": "elsewhere.jsonl",
                "eval": {"other": "other.jsonl"},
                "limit": 1,
                "mixture": {"elsewhere": 1},
            },
            "eval": {"sets": ["other"], "limit": 1},
            "media": {"workers": 0, "max_frames": 4},
            "prompt": {"max_prompt_tokens": 200},
            "training": {"steps": 1, "micro_batch_tokens": 40_000},
        },
    )


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_all_that_was_prepared_is_checked(tmp_path: Path, config: Path, form: str) -> None:
    case, raw, out = star.CASES["folder"], tmp_path / "raw", tmp_path / "out"
    lay_out(raw, case.files)
    words = ["prepare", "star", str(raw), "--check", str(config), "--format", form, "--out", str(out)]
    assert cli.main(words) == 0
    told = json.loads((out / "check/check.json").read_text())["sets"]
    assert {name: one["records"] for name, one in told.items()} == {
        "data.train": len(case.train),
        "data.eval.eval": len(case.evaluation),
    }
    assert "Prompt length in tokens" in (out / "check/check.html").read_text()
    assert cli.main(words) == 0, "what is prepared already is checked again"


def test_what_a_run_could_not_use_is_said(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("200", "20"))
    lay_out(tmp_path / "raw", math.CASES["one object a file"].files)
    words = ["prepare", "math", str(tmp_path / "raw"), f"--out={tmp_path / 'out'}", f"--check={config}"]
    assert cli.main(words) == 1
    assert "prompt_too_long" in capsys.readouterr().out
    told = json.loads((tmp_path / "out/check/check.json").read_text())["sets"]
    assert {name: one["records"] for name, one in told.items()} == {"data.train": 3, "data.eval.eval": 2}
    assert (tmp_path / "out/manifest.json").is_file()


def test_a_check_of_nothing_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay_out(tmp_path / "raw", math.CASES["one object a file"].files)
    words = ["prepare", "math", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--check"]
    assert cli.main([*words, str(tmp_path / "lost.yaml")]) == 2
    assert "which is no file" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "run.yaml").write_text("")
    assert cli.main(["prepare", "math", str(tmp_path / "raw"), "--check", str(tmp_path / "run.yaml")]) == 2
    assert "--check is given without --out" in capsys.readouterr().err


def test_a_set_without_a_report_is_refused_by_name(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prepare", "embedded", "--out", str(tmp_path / "out"), "--train", "2", "--eval", "2"]
    assert cli.main([*words, "--check", str(config)]) == 2
    assert "has no report.json" in capsys.readouterr().err

"""``vlm-pg prepare`` finds every pipeline without importing it, runs one with its arguments, and checks its records."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.published import math, star
from tests.support.published.case import lay_out
from tests.support.runs import write_config
from vlm_pg import cli
from vlm_pg.commands import PIPELINES, find_pipelines


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``data_pipelines`` of two data sets and a module that is none."""
    folder = tmp_path / PIPELINES
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "common.py").write_text('"""Shared code."""\n')
    (folder / "broken_on_import.py").write_text('"""Never imported when listed."""\n1 / 0\ndef main(argv): ...\n')
    (folder / "flowers.py").write_text(
        '"""Pictures of flowers.\n\nMore.\n\nLicence: CC0,\nof all.\n"""\nfrom pathlib import Path\n'
        "def main(argv):\n    Path(argv[1]).write_text(' '.join(argv))\n    return 3\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == PIPELINES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PIPELINES]:
        del sys.modules[name]


def test_the_list_has_a_line_for_each(pipelines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        ["broken_on_import", "Never imported when listed."],
        ["flowers", "Pictures of flowers."],
        ["Licence:", "CC0, of all."],
    ]


def test_one_runs_with_its_arguments_and_exit_code(pipelines: Path, tmp_path: Path) -> None:
    assert cli.main(["prepare", "flowers", "--out", str(tmp_path / "x"), "--n"]) == 3
    assert (tmp_path / "x").read_text() == f"--out {tmp_path / 'x'} --n"


def test_an_unknown_name_lists_the_known_ones(pipelines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", "trees"]) == 2
    assert "There is no data set 'trees'. Known are broken_on_import, flowers. Run vlm-pg" in capsys.readouterr().err


def test_the_real_ones_have_a_summary() -> None:
    found = find_pipelines()
    assert {"embedded", "video_r1"} <= set(found)
    assert all(found.values())


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
    sets = json.loads((out / "check/check.json").read_text())["sets"]
    counts = {"data.train": len(case.train), "data.eval.eval": len(case.evaluation)}
    assert {name: one["records"] for name, one in sets.items()} == counts
    assert "Prompt length in tokens" in (out / "check/check.html").read_text()
    assert cli.main(words) == 0, "what is prepared already is checked again"


def test_unusable_records_are_reported(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("200", "20"))
    lay_out(tmp_path / "raw", math.CASES["one object a file"].files)
    words = ["prepare", "math", str(tmp_path / "raw"), f"--out={tmp_path / 'out'}", f"--check={config}"]
    assert cli.main(words) == 1
    assert "prompt_too_long" in capsys.readouterr().out
    sets = json.loads((tmp_path / "out/check/check.json").read_text())["sets"]
    assert {name: one["records"] for name, one in sets.items()} == {"data.train": 3, "data.eval.eval": 2}
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

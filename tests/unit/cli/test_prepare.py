"""``vlm-pg prepare`` finds every pipeline without importing it, and runs one with its own arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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

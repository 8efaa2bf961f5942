"""``vlm-pg prepare`` on every form in which every data set is published: the expected records and refusals, row by row.

The tables are written by hand, from how the sources publish their files.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.support.published.case import Published, check, dataset_of
from vlm_pg.commands import find_pipelines

NAMES = sorted(set(find_pipelines()) - {"embedded"})
TABLES: dict[str, dict[str, Published]] = {
    name: importlib.import_module(f"tests.support.published.{name}").CASES for name in NAMES
}


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"generic"}))
def test_every_form_is_in_its_table(name: str) -> None:
    known = set(range(len(dataset_of(name).forms)))
    assert {number for case in TABLES[name].values() for number in case.forms} == known


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, cases in TABLES.items() for form in cases])
def test_published_files_become_the_expected_records(name: str, form: str, tmp_path: Path) -> None:
    check(name, TABLES[name][form], tmp_path / "raw", tmp_path / "out")

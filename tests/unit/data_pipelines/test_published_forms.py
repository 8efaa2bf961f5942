"""``vlm-pg prepare`` on every form in which every data set is published: the expected records and refusals, row by row.

The tables are written by hand, from how the sources publish their files. The first of each form are in the usual run;
further ones have the same rows in other folders, or under other arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.published.case import cases_of, check, dataset_of
from vlm_pg.commands import find_pipelines

NAMES = sorted(set(find_pipelines()) - {"embedded"})


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"generic"}))
def test_every_form_is_in_its_table(name: str) -> None:
    known = set(range(len(dataset_of(name).forms)))
    assert {number for case in cases_of(name).values() for number in case.forms} == known


def all_cases() -> list[Any]:
    found = []
    for name in NAMES:
        seen: set[int] = set()
        for form, case in cases_of(name).items():
            marks = () if not seen.issuperset(case.forms) or name == "generic" else (pytest.mark.matrix,)
            found.append(pytest.param(name, form, marks=marks))
            seen.update(case.forms)
    return found


@pytest.mark.parametrize(("name", "form"), all_cases())
def test_published_files_become_the_expected_records(name: str, form: str, tmp_path: Path) -> None:
    check(name, cases_of(name)[form], tmp_path / "raw", tmp_path / "out")

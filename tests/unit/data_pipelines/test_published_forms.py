"""``vlm-pg prepare`` on every form in which every data set is published: the expected records and refusals, row by row.

The tables are written by hand, from how the sources publish their files.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from data_pipelines.engine import summary
from tests.support.published.case import Published, check, dataset_of
from vlm_pg.cli_prepare import find_pipelines
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.rewards import rewarder
from vlm_pg.rewards.mathematics import PREPARE
from vlm_pg.rewards.pool import CheckerPool
from vlm_pg.rewards.settings import CheckerSettings

NAMES = sorted(p.stem for p in Path("tests/support/published").glob("*.py") if p.stem not in ("case","__init__"))
TABLES: dict[str, dict[str, Published]] = {
    name: importlib.import_module(f"tests.support.published.{name}").CASES for name in NAMES
}


@pytest.fixture(scope="module", autouse=True)
def processes_once() -> Iterator[None]:
    """One process decodes for all summaries, one checks mathematics: to start them takes longer than all else."""
    decoder, checker = decoding_pool(MediaSettings(workers=1)), CheckerPool(CheckerSettings(workers=1), [PREPARE])
    assert decoder is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "MediaLoader", partial(MediaLoader, pool=decoder))
        patch.setattr(rewarder, "CheckerPool", lambda *settings: checker)
        patch.setattr(checker, "close", lambda: None)  # by the rewarder of one case
        yield
    checker.close()
    decoder.close()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"generic"}))
def test_every_form_is_in_its_table(name: str) -> None:
    known = set(range(len(dataset_of(name).forms)))
    assert {number for case in TABLES[name].values() for number in case.forms} == known


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, cases in TABLES.items() for form in cases])
def test_published_files_become_the_expected_records(name: str, form: str, tmp_path: Path) -> None:
    check(name, TABLES[name][form], tmp_path / "raw", tmp_path / "out")

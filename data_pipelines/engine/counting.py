"""A first way through the annotation files: how many rows they have, and in which folders those say their media are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import DataSet, Form
from data_pipelines.engine.judging import Source
from vlm_pg.data.files import root_of


def count_rows(dataset: DataSet, sources: Sequence[Source]) -> tuple[dict[Path, int], str | None]:
    """The rows of each file, and the one folder that all rows' media are in, as their forms tell; None: of several.

    Raises:
        ConfigError: a file cannot be read.
    """
    rows, folders = {}, set()
    for source in sources:
        form, beside, number = dataset.forms[source.form], root_of(source.path), 0
        for _, row in form.rows(source.path):
            number += 1
            if form.folder is not None:
                folders.add(_folder(form, row, beside))
        rows[source.path] = number
    folders.discard(None)
    return rows, folders.pop() if len(folders) == 1 else None


def _folder(form: Form, row: Any, beside: Path) -> str | None:
    """The folder of a row's media; None where it has none, because it is refused."""
    with suppress(KeyError, TypeError):
        return form.folder(row, beside) if isinstance(row, Mapping) and form.folder is not None else None
    return None

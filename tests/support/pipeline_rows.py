"""What pipelines make of annotation files, row by row and without the command, and of rows damaged in every place."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.rows import MediaStore, RowReader, SkippedRow, form_of, row_names
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import root_of
from vlm_pg.data.records import parse_record
from vlm_pg.types import BadSample, Sample

Outcomes = Sequence[Sample | BadSample]
_ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: "", lambda: " ", lambda: "odd", lambda: "\ud83d", lambda: True, lambda: -1, lambda: 7.5,
    lambda: float("nan"), lambda: 10**400, list, dict, lambda: [None], lambda: [[]], lambda: [{}], lambda: {"a": None},
    lambda: Unreadable("odd"),
)  # fmt: skip
# Fields that the forms' readers add to a row: only they could damage those.
_ADDED = (
    "cut", "file", "fine", "fine_dim", "judged", "length", "map", "mapped", "number", "pictures", "subtitle_file",
    "task", "track", "video_name",
)  # fmt: skip


def outcomes(dataset: DataSet, *paths: Path, root: Path | None = None) -> list[Sample | BadSample]:
    """What becomes of each question of these files, in order, but for rows that are left out.

    ``root``: of the media; None: they are not looked for.
    """
    names, found = row_names(paths), list[Sample | BadSample]()
    finder = None if root is None else MediaFinder(root, dataset)
    for path in paths:
        form = form_of(dataset, path)
        reader = RowReader(dataset, form, finder, None if root is None else MediaStore(root), root_of(path))
        for location, row in form.rows(path):
            results = reader.samples(row, f"{names[path]}-{location.key}", location.within(path))
            found += [one for one in results if not isinstance(one, SkippedRow)]
    return found


def parted(dataset: DataSet, *paths: Path, root: Path | None = None) -> tuple[list[Sample], list[BadSample]]:
    """The same, samples and refusals apart."""
    found = outcomes(dataset, *paths, root=root)
    return [one for one in found if isinstance(one, Sample)], [one for one in found if isinstance(one, BadSample)]


def kept(dataset: DataSet, *paths: Path, root: Path | None = None) -> list[Sample]:
    """The samples of files of which nothing is refused."""
    samples, refused = parted(dataset, *paths, root=root)
    assert not refused, refused
    return samples


def verdicts(dataset: DataSet, *paths: Path, root: Path | None = None) -> list[tuple[str, str]]:
    """Of each question its name, and its answer or "refused: REASON"."""
    return [
        (one.sample_id, one.answer if isinstance(one, Sample) else f"refused: {one.reason}")
        for one in outcomes(dataset, *paths, root=root)
    ]


def samples_of(found: Outcomes) -> dict[str, Sample]:
    """Samples by their ids."""
    return {one.sample_id: one for one in found if isinstance(one, Sample)}


def reasons_of(found: Outcomes) -> dict[str, str]:
    """Reasons of the refused by their names."""
    return {one.sample_id: one.reason for one in found if isinstance(one, BadSample)}


def one_row(dataset: DataSet, row: Any, form: int = 0) -> list[Sample | BadSample]:
    """What becomes of a row of one of the forms."""
    results = RowReader(dataset, dataset.forms[form]).samples(row, "rows-1", "rows.jsonl:1")
    return [one for one in results if not isinstance(one, SkippedRow)]


def example(module: ModuleType) -> Sample:
    """The sample of the record that a pipeline's docstring shows."""
    return parse_record(json.loads((inspect.getdoc(module) or "").partition("\nRecord: ")[2]))


def check_odd_rows(dataset: DataSet, row: Any, form: int = 0) -> list[tuple[str, BadSample]]:
    """The refusals of a row damaged in one place in one way, by the damage: "without answer", "answer=7.5".

    Each damaged row becomes samples or refusals with an expected reason, and never raises.
    """
    refused = []
    for damage, odd in _odd_rows(row):
        for one in one_row(dataset, odd, form):
            if isinstance(one, BadSample):
                assert one.reason != "unexpected_row", (damage, one.message)
                refused.append((damage, one))
    return refused


def _odd_rows(row: Any) -> Iterator[tuple[str, Any]]:
    yield from (("no row", value) for value in (None, 3, "text", [], {}, Unreadable("odd")))
    for path in _paths(row):
        if path[0] in _ADDED:
            continue
        name = ".".join(map(str, path))
        yield f"without {name}", _changed(row, path, None)
        yield from ((f"{name}={odd()!r}", _changed(row, path, odd)) for odd in _ODD)


def _changed(row: Any, path: tuple[Any, ...], odd: Callable[[], Any] | None) -> Any:
    changed = copy.deepcopy(row)
    *outer, last = path
    inner = changed
    for key in outer:
        inner = inner[key]
    if odd is None:
        del inner[last]
    else:
        inner[last] = odd()
    return changed


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Keys and indices of everything in a value, outermost first."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (key,)
        yield from ((key, *further) for further in _paths(inner))


def write_json(path: Path, rows: Any) -> Path:
    """On one line, as large files are published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def empty_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")

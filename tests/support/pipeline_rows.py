"""What pipelines make of annotation files, row by row and without the command, and of rows damaged in every place."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from data_pipelines.engine.annotation_files import find_files
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


def outcomes(dataset: DataSet, *paths: Path, root: Path | None = None) -> list[Sample | BadSample]:
    """What becomes of each question of these files, in order, but for rows that are left out.

    ``root``: of the media; None: they are not looked for.
    """
    names, found = row_names(paths), list[Sample | BadSample]()
    finder = None if root is None else MediaFinder(root, dataset)
    for path in paths:
        form = form_of(dataset, path)
        reader = RowReader(form, finder, None if root is None else MediaStore(root), root_of(path))
        for place, row in form.rows(path):
            results = reader.samples(row, f"{names[path]}-{place.key}", place.within(path))
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


def annotations(dataset: DataSet, folder: Path) -> dict[str, list[str]]:
    """The annotation files of each split in a folder, relative to it."""
    found, _ = find_files(dataset, folder)
    return {split: [path.relative_to(folder).as_posix() for path in files] for split, files in found.items()}


def one_row(dataset: DataSet, row: Any, form: int = 0) -> list[Sample | BadSample]:
    """What becomes of a row of one of the forms."""
    results = RowReader(dataset.forms[form]).samples(row, "rows-1", "rows.jsonl:1")
    return [one for one in results if not isinstance(one, SkippedRow)]


def example(module: ModuleType) -> Sample:
    """The sample of the record that a pipeline's docstring shows."""
    return parse_record(json.loads((inspect.getdoc(module) or "").partition("\nRecord: ")[2]))


def check_odd_rows(
    dataset: DataSet, row: Any, form: int = 0, added: Sequence[str] = ("file",)
) -> list[tuple[str, BadSample]]:
    """The refusals of a row damaged in one place in one way, by what was done: "without answer", "answer=7.5".

    Each damaged row becomes samples or refusals that someone expected, and never raises.

    Args:
        dataset, row, form: as ``one_row``.
        added: fields that are not damaged, because the form's own reader adds them.
    """
    refused = []
    for what, odd in _odd_rows(row, added):
        for one in one_row(dataset, odd, form):
            if isinstance(one, BadSample):
                assert one.reason != "unexpected_row", (what, one.message)
                refused.append((what, one))
    return refused


def rows_of(dataset: DataSet, path: Path) -> list[Any]:
    """The rows of a file, as its form reads them."""
    return [row for _, row in form_of(dataset, path).rows(path)]


def _odd_rows(row: Any, added: Sequence[str]) -> Iterator[tuple[str, Any]]:
    yield from (("no row", value) for value in (None, 3, "text", [], {}, Unreadable("odd")))
    for place in _places(row):
        if place[0] in added:
            continue
        name = ".".join(map(str, place))
        yield f"without {name}", _changed(row, place, None)
        yield from ((f"{name}={odd()!r}", _changed(row, place, odd)) for odd in _ODD)


def _changed(row: Any, place: tuple[Any, ...], odd: Callable[[], Any] | None) -> Any:
    changed = copy.deepcopy(row)
    *way, last = place
    inner = changed
    for step in way:
        inner = inner[step]
    if odd is None:
        del inner[last]
    else:
        inner[last] = odd()
    return changed


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to everything that stands in a value."""
    steps = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (step,)
        yield from ((step, *further) for further in _places(inner))


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


def check_example(module: ModuleType, row: Any, form: int = 0, **changes: Any) -> None:
    """A row becomes the record that the pipeline's docstring shows, but for these ``changes``."""
    (sample,) = one_row(getattr(module, module.__name__.rpartition(".")[2].upper()), row, form)
    assert isinstance(sample, Sample) and replace(sample, where="", **changes) == example(module)

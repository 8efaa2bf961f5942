"""Annotation files of a data set: discovery in its folder, their forms, and the state that preparation depends on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import DataSet, Form, Split, files_beside
from data_pipelines.engine.judging import AnnotationFile
from data_pipelines.engine.output_folder import fingerprint, sha256_of
from data_pipelines.engine.rows import form_of, row_names
from vlm_pg.data.files import SPLITS as SPLITS_FILE
from vlm_pg.data.files import STATE, NoSuchSplit, data_folder, files_of, root_of
from vlm_pg.errors import ConfigError, printable

MANY_FILES = 50
SPLITS: tuple[Split, ...] = ("train", "eval")
_LISTED = 12


@dataclass(frozen=True)
class Recognized:
    """Annotation files in a folder that match a pattern of a form, for a split.

    ``fault``: why some of them cannot be read: a split of shards is incomplete.
    """

    form: str
    split: Split
    files: tuple[Path, ...]
    fault: ConfigError | None = None

    def __str__(self) -> str:
        first, more = printable(str(self.files[0]), 300), len(self.files) - 1
        shown = f"'{first}'" + (f" and {more:,} more" if more else "")
        part = "not all of its shards are there; " if self.fault is not None else ""
        other = f"{part}others are read for {self.split}. Name files with --train and --eval to choose them"
        return f"{shown} ({self.form}): {other}"

    def as_json(self) -> dict[str, Any]:
        files = [str(path) for path in self.files[:_LISTED]]
        return {"form": self.form, "split": self.split, "count": len(self.files), "files": files}


def find_files(dataset: DataSet, folder: Path) -> tuple[Mapping[Split, Sequence[Path]], list[Recognized]]:
    """The annotation files of each split, and those of the set that are not read.

    A split's files are all matches of the first matching pattern of the first matching form: mirrors and other forms
    hold the same questions. So the splits may be of different forms.

    Raises ConfigError: no such folder, no annotation files (with its entries and the nearest form), or an incomplete
    split.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"'{printable(str(folder), 300)}' is not a folder. The folder that {dataset.name} unpacks to is expected. "
            "Correct it, or name its annotation files with --train and --eval."
        )
    found = list(_recognized(dataset, folder))
    if not found:
        raise ConfigError(_nothing_found(dataset, folder))
    chosen = {split: next((one for one in found if one.split == split), None) for split in SPLITS}
    for first in chosen.values():
        if first is not None and first.fault is not None:
            raise first.fault
    reported = {file for one in chosen.values() if one is not None for file in _shards(one.files)}
    unread = []
    for one in found:
        if files := tuple(path for path in one.files if not reported.issuperset(_shards([path]))):
            unread.append(replace(one, files=files))
            reported.update(_shards(files))
    return {split: [] if one is None else list(one.files) for split, one in chosen.items()}, unread


def _recognized(dataset: DataSet, folder: Path) -> Iterator[Recognized]:
    for form in dataset.forms:
        for split in SPLITS:
            for pattern in form.files.get(split, ()):
                files, fault = _matches(folder, pattern)
                if files:
                    yield Recognized(form.name, split, tuple(files), fault)


def _shards(paths: Sequence[Path]) -> Iterator[Path]:
    """The files themselves: several patterns may match the same shards."""
    for path in paths:
        try:
            yield from (file.resolve() for file in files_of(path))
        except ConfigError:  # incomplete
            yield path.resolve()


def _matches(folder: Path, pattern: str) -> tuple[list[Path], ConfigError | None]:
    """Files, or for "data:train" that split of folders of shards; and the fault of the first incomplete one."""
    before, colon, split = pattern.rpartition(":")
    if not colon:
        return sorted(path for path in folder.glob(pattern) if path.is_file()), None
    found: list[Path] = []
    fault: ConfigError | None = None
    for parent in [folder] if before == "." else sorted(path for path in folder.glob(before) if path.is_dir()):
        named = Path(f"{parent}:{split}")
        try:
            if data_folder(named) is not None:
                found.append(named)
        except NoSuchSplit:
            continue
        except ConfigError as error:  # an incomplete split must not count as absent
            # The fault of a folder of shards may be about this split where it has some.
            files = (path for shards in (parent, parent / "data") for path in shards.glob("*.parquet"))
            is_saved = any((parent / name).is_file() for name in (STATE, SPLITS_FILE))
            if is_saved or any(path.name.startswith(f"{split}-") for path in files):
                found.append(named)
                fault = fault or error
    return found, fault


def _nothing_found(dataset: DataSet, folder: Path) -> str:
    entries = sorted(folder.iterdir())
    found = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in entries)
    shown = ", ".join(printable(name, 80) for name in found[:_LISTED]) + (" ..." if len(found) > _LISTED else "")
    inner = [entry for entry in entries if entry.is_dir() and _holds_files(dataset, entry)]
    hint = "Give the folder as the archive unpacks, or name the files with --train and --eval"
    if inner:
        hint = f"Its folder '{printable(inner[0].name, 80)}' holds such files: give that one"
    forms = "; ".join(f"{form.name}: {', '.join(chain(*form.files.values()))}" for form in dataset.forms)
    return (
        f"'{printable(str(folder), 300)}' holds no annotation files of {dataset.name}. Expected are {forms}. Found are "
        f"{shown or 'no files at all'}. {hint}."
    )


def _holds_files(dataset: DataSet, folder: Path) -> bool:
    try:
        return any(True for _ in _recognized(dataset, folder))
    except OSError:
        return False


def read_alone(dataset: DataSet, names: Iterable[str]) -> set[str]:
    """Which of these files would be read from a folder that held them alone."""
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / os.path.basename(name)).touch()
        for form in dataset.forms:
            for patterns in form.files.values():
                matches = (_matches(Path(folder), pattern)[0] for pattern in patterns)
                first = next(filter(None, matches), [])
                found.update(file.name for path in first for file in files_of(path))
    return found


def sources_of(dataset: DataSet, files: Mapping[Split, Sequence[Path]], out: Path) -> list[AnnotationFile]:
    """The annotation files, each with its form.

    Raises ConfigError: a file is of no form, or an input lies in the output folder ``out``.
    """
    paths = [path for split in SPLITS for path in files[split]]
    refuse_inside(out, (file for path in paths for file in files_of(path)))
    refuse_inside(out, dataset.described_in)
    names = row_names(paths)
    found = []
    for split in SPLITS:
        form: Form | None = None
        for number, path in enumerate(files[split]):
            # Of thousands of files of one object each, the form of the first ones is that of all.
            form = form_of(dataset, path) if form is None or number < MANY_FILES else form
            found.append(AnnotationFile(path, dataset.forms.index(form), names[path], split))
    refuse_inside(out, _beside(dataset, found))
    return found


def count_rows(dataset: DataSet, sources: Sequence[AnnotationFile]) -> tuple[dict[Path, int], str | None]:
    """The number of rows of each file, and the one folder of all rows' media (``Form.folder``); None: several.

    Raises ConfigError: a file cannot be read.
    """
    rows, folders = {}, set()
    for source in sources:
        form, beside, number = dataset.forms[source.form], root_of(source.path), 0
        for _, row in form.rows(source.path):
            number += 1
            if form.folder is not None and isinstance(row, Mapping):
                with suppress(KeyError, TypeError):  # a row that is refused
                    folders.add(form.folder(row, beside))
        rows[source.path] = number
    folders.discard(None)
    return rows, folders.pop() if len(folders) == 1 else None


def states_of(dataset: DataSet, sources: Sequence[AnnotationFile]) -> dict[str, Any]:
    """The states of all files that are read, as JSON values: size and modification time."""
    states: dict[str, Any] = {}
    for split in SPLITS:
        of_split = [source for source in sources if source.split == split]
        files = [state_of(source.path, f"--{split}") for source in of_split]
        files += [state_of(path, "the folder") for path in sorted(_beside(dataset, of_split))]
        states[f"{split}_files"] = files if len(files) <= MANY_FILES else [len(files), fingerprint({"all": files})]
    if dataset.described_in:
        states["described_in"] = [state_of(path, "the command") for path in dataset.described_in]
    return states


def details_of(dataset: DataSet, sources: Sequence[AnnotationFile], rows: Mapping[Path, int]) -> list[dict[str, Any]]:
    """The first files for the manifest. ``rows``: their number in each."""
    return [
        {
            "path": str(source.path),
            "form": dataset.forms[source.form].name,
            "split": source.split,
            "rows": rows[source.path],
            "sha256": sha256_of(files_of(source.path)),
        }
        for source in sources[:MANY_FILES]
    ]


def refuse_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse files that were written while they were read.

    Args:
        before, now: the run's inputs when it began, and after all was read.

    Raises ConfigError: they differ.
    """
    changed = [name for name in before if before[name] != now[name]]
    if not changed:
        return
    old = {str(one) for name in changed for one in before[name]}
    paths = [one["path"] for name in changed for one in now[name] if isinstance(one, dict) and str(one) not in old]
    shown = ", ".join(f"'{printable(path, 300)}'" for path in paths[:6]) or "One of the files"
    raise ConfigError(
        f"{shown} changed while the set was prepared: a download that goes on, or another program. Files that stay as "
        "they are, are needed; nothing was replaced. Wait until they are complete, and give the same command again."
    )


def _beside(dataset: DataSet, sources: Iterable[AnnotationFile]) -> set[Path]:
    return {path for source in sources for path in files_beside(source.path, dataset.forms[source.form].beside)}


def refuse_inside(out: Path, paths: Iterable[Path]) -> None:
    """Refuse an output folder that contains an input: it would be replaced, or read as output.

    Raises ConfigError: one of the paths lies in the folder or is it, as written or with links resolved.
    """
    real = out.resolve()
    for path in paths:
        # A link in the folder is as much in the way as the target of a link from outside.
        if any(one.is_relative_to(real) for one in (path.resolve(), path.parent.resolve() / path.name)):
            raise ConfigError(
                f"'{printable(str(path), 300)}' is read, and lies in --out '{printable(str(out), 300)}'. A folder of "
                "its own is expected, which holds the prepared set alone: files in it are replaced. Choose another."
            )


def state_of(path: Path, option: str) -> dict[str, Any]:
    """A file or folder of records as a JSON value that changes when it does: size and modification time.

    Raises ConfigError: it does not exist. ``option``: the argument to correct.
    """
    folder = data_folder(path)
    if folder is not None:
        return {"path": str(path.resolve()), "files": [state_of(file, option) for file in folder.files]}
    if not path.is_file():
        raise ConfigError(
            f"Data file '{path}' does not exist. A file or folder as the data set's project publishes it is expected. "
            f"Correct {option}."
        )
    state = path.stat()
    return {"path": str(path.resolve()), "bytes": state.st_size, "changed_ns": state.st_mtime_ns}

"""The annotation files of a data set in the folder that it unpacks to."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import DataSet, Split
from vlm_pg.data.files import SPLITS as SPLITS_FILE
from vlm_pg.data.files import STATE, NoSuchSplit, data_folder, files_of
from vlm_pg.errors import ConfigError, printable

_LISTED = 12
SPLITS: tuple[Split, ...] = ("train", "eval")


@dataclass(frozen=True)
class Recognised:
    """Annotation files in a folder that a pattern of a form names, for a split.

    ``fault``: why some of them cannot be read: a split of shards is there in part.
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

    def told(self) -> dict[str, Any]:
        """As JSON values."""
        files = [str(path) for path in self.files[:_LISTED]]
        return {"form": self.form, "split": self.split, "count": len(self.files), "files": files}


def annotation_files(dataset: DataSet, folder: Path) -> tuple[Mapping[Split, Sequence[Path]], list[Recognised]]:
    """The files of each split, and those that are annotation files of the set, too, but not read.

    Of each split all files are those of the first pattern that names any, of the first form that has such: mirrors and
    other forms hold the same questions. So training may be of one form and evaluation of another.

    Raises:
        ConfigError: it is no folder, or has none (with what it has and which form is nearest), or what would be read
            is there in part.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"'{printable(str(folder), 300)}' is not a folder. The folder that {dataset.name} unpacks to is expected. "
            "Correct it, or name its annotation files with --train and --eval."
        )
    found = list(_recognised(dataset, folder))
    if not found:
        raise ConfigError(_nothing_found(dataset, folder))
    chosen = {split: next((one for one in found if one.split == split), None) for split in SPLITS}
    for first in chosen.values():
        if first is not None and first.fault is not None:
            raise first.fault
    told = {file for one in chosen.values() if one is not None for file in _parts(one.files)}
    unread = []
    for one in found:
        if files := tuple(path for path in one.files if not told.issuperset(_parts([path]))):
            unread.append(replace(one, files=files))
            told.update(_parts(files))
    return {split: [] if one is None else list(one.files) for split, one in chosen.items()}, unread


def _recognised(dataset: DataSet, folder: Path) -> Iterator[Recognised]:
    for form in dataset.forms:
        for split in SPLITS:
            for pattern in form.files.get(split, ()):
                files, fault = _matches(folder, pattern)
                if files:
                    yield Recognised(form.name, split, tuple(files), fault)


def _parts(paths: Sequence[Path]) -> Iterator[Path]:
    """The files themselves: several patterns may name the same shards."""
    for path in paths:
        try:
            yield from (file.resolve() for file in files_of(path))
        except ConfigError:  # it is there in part
            yield path.resolve()


def _matches(folder: Path, pattern: str) -> tuple[list[Path], ConfigError | None]:
    """Files, or for "data:train" that split of a folder of shards; and what is wrong with the first that is in part."""
    before, colon, split = pattern.rpartition(":")
    if not colon:
        return sorted(path for path in folder.glob(pattern) if path.is_file()), None
    found: list[Path] = []
    fault: ConfigError | None = None
    for place in [folder] if before == "." else sorted(path for path in folder.glob(before) if path.is_dir()):
        named = Path(f"{place}:{split}")
        try:
            if data_folder(named) is not None:
                found.append(named)
        except NoSuchSplit:
            continue
        except ConfigError as error:  # of one that is there in part nobody should learn by its absence
            if _may_be_there(place, split):
                found.append(named)
                fault = fault or error
    return found, fault


def _may_be_there(folder: Path, split: str) -> bool:
    """Whether what is wrong with a folder may be about this split: in one of shards it is where it has some."""
    if any((folder / name).is_file() for name in (STATE, SPLITS_FILE)):
        return True
    return any(
        path.name.startswith(f"{split}-") for place in (folder, folder / "data") for path in place.glob("*.parquet")
    )


def _nothing_found(dataset: DataSet, folder: Path) -> str:
    wanted = {
        form.name: [pattern for patterns in form.files.values() for pattern in patterns] for form in dataset.forms
    }
    found = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    shown = ", ".join(printable(name, 80) for name in found[:_LISTED]) + (" ..." if len(found) > _LISTED else "")
    inner = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and _holds_one(dataset, entry)]
    if inner:
        hint = f"Its folder '{printable(inner[0].name, 80)}' holds such files: give that one"
    elif nearest := _nearest(wanted, found):
        hint = (
            f"Nearest is {nearest}. Give the folder as the archive unpacks, or name the files with --train and --eval"
        )
    else:
        hint = "Give the folder as the archive unpacks, or name the files with --train and --eval"
    forms = "; ".join(f"{name}: {', '.join(patterns)}" for name, patterns in wanted.items())
    return (
        f"'{printable(str(folder), 300)}' holds no annotation files of {dataset.name}. Expected are {forms}. Found are "
        f"{shown or 'no files at all'}. {hint}."
    )


def _holds_one(dataset: DataSet, folder: Path) -> bool:
    try:
        return any(True for _ in _recognised(dataset, folder))
    except OSError:
        return False


def _nearest(wanted: dict[str, list[str]], found: list[str]) -> str:
    """The form one of whose patterns is most like a name that is there."""
    best = (0.6, "")
    for form, patterns in wanted.items():
        for pattern in patterns:
            name = os.path.basename(pattern)
            for other in found:
                alike = difflib.SequenceMatcher(None, name, other.rstrip("/")).ratio()
                best = max(best, (alike, f"the form {form}: '{printable(other, 80)}' is like '{name}'"))
    return best[1]


def read_alone(dataset: DataSet, names: Iterable[str]) -> set[str]:
    """Which of some files, if a folder held these alone, would be read: of each split those of the first pattern."""
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

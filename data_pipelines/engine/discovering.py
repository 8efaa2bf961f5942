"""The annotation files of a data set in the folder that it unpacks to."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_pipelines.engine.dataset import DataSet, Form, Split
from vlm_pg.data.folders import NoSuchSplit, data_folder, files_of
from vlm_pg.errors import ConfigError, printable

_LISTED = 12
SPLITS: tuple[Split, ...] = ("train", "eval")


def annotation_files(dataset: DataSet, folder: Path) -> dict[Split, list[Path]]:
    """The files of the first form that the folder has any of, by split.

    Raises:
        ConfigError: it is no folder, or has none (with what it has and which form is nearest), or has a split in part.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"'{printable(str(folder), 300)}' is not a folder. The folder that {dataset.name} unpacks to is expected. "
            "Correct it, or name its annotation files with --train and --eval."
        )
    for form in dataset.forms:
        files = _files_of(form, folder)
        if any(files.values()):
            return files
    raise ConfigError(_nothing_found(dataset, folder))


def _files_of(form: Form, folder: Path) -> dict[Split, list[Path]]:
    """Of each split those of the first pattern that names any: mirrors hold the same questions in several files."""
    matches = {split: (list(_matches(folder, pattern)) for pattern in form.files.get(split, ())) for split in SPLITS}
    return {split: next(filter(None, found), []) for split, found in matches.items()}


def _matches(folder: Path, pattern: str) -> Iterator[Path]:
    """Files, or for "data:train" that split of a folder of shards.

    Raises:
        ConfigError: a split is there, and not all of it.
    """
    before, colon, split = pattern.rpartition(":")
    if not colon:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())
        return
    for place in [folder] if before == "." else sorted(path for path in folder.glob(before) if path.is_dir()):
        named = Path(f"{place}:{split}")
        try:
            if data_folder(named) is not None:
                yield named
        except NoSuchSplit:  # of one that is there in part nobody should learn by its absence
            continue


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
        return any(any(_files_of(form, folder).values()) for form in dataset.forms)
    except ConfigError:  # of a split that is there in part
        return True
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
                matches = (list(_matches(Path(folder), pattern)) for pattern in patterns)
                first = next(filter(None, matches), [])
                found.update(file.name for path in first for file in files_of(path))
    return found

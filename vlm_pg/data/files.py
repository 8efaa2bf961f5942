"""Raw records with their locations: JSON, JSON lines, Parquet, and folders that hold a data set.

    data/gsm8k:train      one split of a folder
    data/gsm8k            the only split of a folder

Only files that lie in the folder are read, under the names they are given there. Nothing is looked up elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.data.json_stream import read_elements, read_lines, read_members, unreadable_file
from vlm_pg.data.prepared import check_sizes
from vlm_pg.data.tables import count_rows, read_arrow, read_parquet
from vlm_pg.errors import ConfigError, printable

RECORD_FILES = (".json", ".jsonl", ".ndjson", ".parquet")
STATE, SPLITS = "state.json", "dataset_dict.json"  # of datasets' Dataset.save_to_disk and DatasetDict.save_to_disk
_SHARD = re.compile(r"(?P<split>\w[\w.-]*)-(?P<index>\d{5,9})-of-(?P<count>\d{5,9})(?:-[0-9a-f]{16})?\.parquet")
_LISTED = 12


class NoSuchSplit(ConfigError):
    """A folder that holds no data set, or nothing of the split that is named; another folder may."""


@dataclass(frozen=True)
class DataFolder:
    """One split of a folder: its files in order. ``split`` is empty where the folder is one data set without a name."""

    folder: Path
    split: str
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """For names of records: "gsm8k-train"."""
        # As it is written: what a link points to may be called by a hash.
        return "-".join(filter(None, (Path(os.path.abspath(self.folder)).name, self.split)))


def data_folder(path: Path) -> DataFolder | None:
    """The split of ``FOLDER`` or ``FOLDER:split``; None for a path that is no folder.

    Raises:
        NoSuchSplit: the folder holds no data set, or not that split.
        ConfigError: it holds not all of it, or several splits and none is named.
    """
    named = _named(path)
    if named is None:
        return None
    folder, split = named
    splits = _splits_of(folder)
    if split is None:
        if len(splits) > 1:
            raise _wrong(folder, f"has the splits {_list(splits)}. One of them is expected. Name it: {folder}:SPLIT")
        split = next(iter(splits))
    if split not in splits:
        known = f"has the splits {_list(splits)}" if any(splits) else "has one split, without a name"
        problem = f"{known}, not '{split}'. One of them is expected. Correct the name after the colon"
        raise _wrong(folder, problem, NoSuchSplit)
    return DataFolder(folder, split, tuple(splits[split]))


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that a path of records stands for: those of a split, or itself."""
    found = data_folder(path)
    return (path,) if found is None else found.files


def root_of(path: Path) -> Path:
    """The folder that a path of records lies in, or is."""
    named = _named(path)
    return path.parent if named is None else named[0]


def _named(path: Path) -> tuple[Path, str | None] | None:
    """Folder and split; what exists under the whole name is that. A name that files of records have is a file's."""
    if path.suffix.lower() in RECORD_FILES:
        return None
    try:
        if path.is_dir():
            return path, None
        folder, colon, split = str(path).rpartition(":")
        if colon and not path.exists() and Path(folder).is_dir():
            return Path(folder), split
    except (OSError, ValueError):  # a name that is too long, a folder that may not be entered
        pass
    return None


def _splits_of(folder: Path) -> Mapping[str, Sequence[Path]]:
    if (folder / STATE).is_file():
        split, files = _saved(folder)
        return {split: files}
    if (folder / SPLITS).is_file():
        names = _read(folder / SPLITS).get("splits")
        if isinstance(names, list) and names and all(map(_is_name, names)):
            return {name: _saved(folder / name)[1] for name in names}
        raise _wrong(folder, f"has a {SPLITS} that lists no splits. Names of folders are expected. Save it again")
    for parent in (folder, folder / "data"):
        if shards := _shards(parent):
            return shards
    # A hub keeps each configuration of a data set in a folder of its own.
    inner = [
        entry.name
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and ((entry / STATE).is_file() or any(_SHARD.fullmatch(one.name) for one in entry.iterdir()))
    ]
    raise _wrong(
        folder,
        f"holds no data set{f' itself; its folders {_list(inner)} do' if inner else ''}. What datasets saves to disk, "
        "or Parquet shards such as train-00000-of-00004.parquet (in it or in its folder 'data'), is expected. Name "
        "such a folder, or a file of records",
        NoSuchSplit,
    )


def _saved(folder: Path) -> tuple[str, list[Path]]:
    """Split and files of a data set that was saved to disk; its own list names them, and may say anything."""
    state = _read(folder / STATE)
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(map(_is_name, names)):
        raise _wrong(folder, f"has a {STATE} that lists no files of it. Names of files are expected. Save it again")
    if any(key.startswith("_indices") and value for key, value in state.items()):
        problem = "was saved by an early version of datasets with a list of the rows that count apart from the rows"
        raise _wrong(folder, f"{problem}. Rows in their order are expected. Save it again with a newer one")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise _wrong(folder, f"lacks {_list(missing)}. All files in {STATE} are needed. Copy it again")
    split = state.get("_split")
    return split if isinstance(split, str) else "", [folder / name for name in names]


def _shards(folder: Path) -> dict[str, list[Path]]:
    """The shards of each split in order; all of a split must be there."""
    found: defaultdict[tuple[str, int], dict[int, Path]] = defaultdict(dict)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _SHARD.fullmatch(path.name)
        if match is not None:
            shards, index = found[match["split"], int(match["count"])], int(match["index"])
            if index in shards:
                raise _wrong(folder, f"has shard {index} twice: {_list([shards[index].name, path.name])}. Remove one")
            shards[index] = path
    splits: dict[str, list[Path]] = {}
    for (split, count), shards in found.items():
        if split in splits:
            raise _wrong(folder, f"has shards of '{split}' of two divisions. One is expected. Remove the other")
        if len(shards) != count or max(shards) >= count:  # whatever large number a name holds
            here = f"{len(shards)} of the {count} shards of '{split}'"
            raise _wrong(folder, f"has {here} only. All are expected. Download the others")
        splits[split] = [shards[index] for index in range(count)]
    return splits


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _is_name(name: object) -> bool:
    """Of something in the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _list(names: object) -> str:
    shown = [printable(str(name), 100) for name in names]  # type: ignore[attr-defined]
    return ", ".join(shown[:_LISTED]) + (f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else "")


def _wrong(folder: Path, problem: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    return kind(f"Data folder '{printable(str(folder), 300)}' {problem}.")


@dataclass(frozen=True)
class RecordLocation:
    """Where a record begins.

    Args:
        line: the line (JSON, JSONL) or the row (Parquet, Arrow), counted from 1.
        record: its number in the file, where it shares the line with the record before.
        file: name of the file, in a data set of several.
        row: its number in a data set of several files.
    """

    line: int
    record: int | None = None
    file: str = ""
    row: int | None = None

    def __str__(self) -> str:
        return str(self.line) if self.record is None else f"{self.line}, record {self.record}"

    @property
    def key(self) -> str:
        """As part of a name: "3", or "1.5" of the fifth record on line 1."""
        if self.row is not None:
            return str(self.row)
        return str(self.line) if self.record is None else f"{self.line}.{self.record}"

    def within(self, path: Path) -> str:
        """With the name of its file, for messages: "train.jsonl:3", "train-00001-of-00004.parquet:3"."""
        return f"{printable(self.file or path.name, 300)}:{self}"


def read_raw(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Each record and its location.

    A value that cannot be read (an endless number, a string that is not UTF-8, a date out of range, an object that
    gives one name different values) is ``Unreadable``, in its record or as its record. Media inside rows are
    ``Embedded``.

    Args:
        path: a file, or a folder as ``data_folder`` takes it.

    Raises:
        ConfigError: the file or folder is missing, of another type, cannot be read, does not parse (with the line), or
            belongs to a prepared set and is not as it was written.
    """
    folder = data_folder(path)
    check_sizes((path,) if folder is None else folder.files)
    if folder is not None:
        return _read_folder(folder)
    suffix = path.suffix.lower()
    if suffix not in RECORD_FILES and not path.exists():
        raise ConfigError(
            f"There is no data file '{_shown(path)}'. Give a .json, .jsonl or .parquet file, or a prepared folder and "
            "its split as FOLDER:SPLIT."
        )
    if suffix not in RECORD_FILES:
        raise ConfigError(
            f"Data file '{_shown(path)}' ends in '{printable(path.suffix, 20)}'. Records are read from .json, .jsonl "
            "and .parquet. Convert the file."
        )
    _check_file(path)
    if suffix == ".json":
        return _located(read_elements(path))
    rows = enumerate(read_parquet(path), start=1) if suffix == ".parquet" else read_lines(path)
    return ((RecordLocation(line), record) for line, record in rows)


def count_raw(path: Path) -> int:
    """The number of records that ``read_raw`` yields of a readable file or folder, without parsing where possible."""
    files, suffix = files_of(path), path.suffix.lower()
    if files != (path,) or suffix == ".parquet":
        return sum(map(count_rows, files))
    if suffix in (".jsonl", ".ndjson"):
        _check_file(path)
        with path.open("rb") as file:
            return sum(1 for line in file if not line.isspace())
    return sum(1 for _ in read_raw(path))


def _read_folder(folder: DataFolder) -> Iterator[tuple[RecordLocation, Any]]:
    row = 0
    for file in folder.files:
        _check_file(file)
        rows = read_parquet(file) if file.suffix == ".parquet" else read_arrow(file)
        for line, record in enumerate(rows, start=1):
            row += 1
            yield RecordLocation(line, file=file.name, row=row), record


def _check_file(path: Path) -> None:
    """Refuse what is no file: reading a pipe or a device may never end."""
    try:
        is_file, exists = path.is_file(), path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered
        raise unreadable_file(path, error) from error
    if not is_file:
        came = "is a folder, a pipe, a socket or a device" if exists else "does not exist"
        raise ConfigError(
            f"Data file '{_shown(path)}' {came}. A file of records is expected. Correct the path, relative to "
            "the folder the command is run in."
        )


def read_json_object(path: Path) -> Iterator[tuple[RecordLocation, str, Any]]:
    """The members of a JSON object one by one: location, name, value. See ``read_raw``."""
    _check_file(path)
    yield from _located(read_members(path))


def _located(values: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Locations in place of lines; values after the first on a line are numbered."""
    last_line = 0
    for number, (line, *rest) in enumerate(values, start=1):
        yield RecordLocation(line, number if line == last_line else None), *rest
        last_line = line


def _shown(path: Path) -> str:
    return printable(str(path), 300)

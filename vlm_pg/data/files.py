"""Raw records with their place: JSON arrays, JSON lines, Parquet, and folders of a data set's files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.data.folders import DataFolder, data_folder, files_of
from vlm_pg.data.json_stream import read_elements, read_lines, read_members
from vlm_pg.data.manifest import check_sizes
from vlm_pg.data.tables import count_rows, read_arrow, read_parquet
from vlm_pg.errors import ConfigError, printable


@dataclass(frozen=True)
class RecordPlace:
    """Where a record begins: the line (JSON, JSONL) or the row (Parquet, Arrow), counted from 1.

    Args:
        line: see above.
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


def read_raw(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """Each record and its place.

    What cannot be read (an endless number, a string that is not UTF-8, a date out of range, an object that gives one
    name different values) stands in its record, or as its record, as ``Unreadable``. Media that stand in rows are
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
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".parquet": _numbered_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None and not path.exists():
        raise ConfigError(
            f"There is no data file '{_shown(path)}'. Give a .json, .jsonl or .parquet file, or a prepared folder and "
            "its split as FOLDER:SPLIT."
        )
    if reader is None:
        raise ConfigError(
            f"Data file '{_shown(path)}' ends in '{printable(path.suffix, 20)}'. Records are read from .json, .jsonl "
            "and .parquet. Convert the file."
        )
    _check_file(path)
    return reader(path)


def count_raw(path: Path) -> int:
    """How many records ``read_raw`` would give of a file or folder that can be read; by less than reading them where
    the format allows."""
    files, suffix = files_of(path), path.suffix.lower()
    if files != (path,) or suffix == ".parquet":
        return sum(map(count_rows, files))
    if suffix in (".jsonl", ".ndjson"):
        _check_file(path)
        with path.open("rb") as file:
            return sum(1 for line in file if not line.isspace())
    return sum(1 for _ in read_raw(path))


def _read_folder(folder: DataFolder) -> Iterator[tuple[RecordPlace, Any]]:
    row = 0
    for file in folder.files:
        _check_file(file)
        rows = read_parquet(file) if file.suffix == ".parquet" else read_arrow(file)
        for line, record in enumerate(rows, start=1):
            row += 1
            yield RecordPlace(line, file=file.name, row=row), record


def _numbered_parquet(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    for line, record in enumerate(read_parquet(path), start=1):
        yield RecordPlace(line), record


def _check_file(path: Path) -> None:
    """Refuse what is no file: reading a pipe or a device may never end."""
    try:
        is_file, exists = path.is_file(), path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered
        raise _closed(path, error) from error
    if not is_file:
        came = "is a folder, a pipe, a socket or a device" if exists else "does not exist"
        raise ConfigError(
            f"Data file '{_shown(path)}' {came}. A file of records is expected. Correct the path, relative to "
            "the folder the command is run in."
        )


def _read_json(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """The elements of a JSON array one by one, so that each one's line is known."""
    last_line = 0
    for number, (line, record) in enumerate(read_elements(path), start=1):
        yield RecordPlace(line, number if line == last_line else None), record
        last_line = line


def read_json_object(path: Path) -> Iterator[tuple[RecordPlace, str, Any]]:
    """The members of a JSON object one by one: place, name, value. See ``read_raw``."""
    _check_file(path)
    last_line = 0
    for number, (line, name, value) in enumerate(read_members(path), start=1):
        yield RecordPlace(line, number if line == last_line else None), name, value
        last_line = line


def _read_jsonl(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    for number, record in read_lines(path):
        yield RecordPlace(number), record


def _closed(path: Path, error: Exception) -> ConfigError:
    cause = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"Data file '{_shown(path)}' cannot be read: {cause}. A file of records is expected. Correct the path, or the "
        "rights of the file."
    )


def _shown(path: Path) -> str:
    return printable(str(path), 300)

"""Raw records with their place in the file: JSON arrays, JSON lines, Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.data.unreadable import Unreadable
from vlm_pg.errors import ConfigError, printable

_SPACE = re.compile(r"[ \t\r\n]*")
# Python refuses to read longer numbers, because the time it takes grows with the square of their length
MAX_DIGITS = 4000
ROWS = 1024


@dataclass(frozen=True)
class Place:
    """Where a record begins: the line (JSON, JSONL) or the row (Parquet), counted from 1.

    ``record``: its number in the file, where it shares the line with the record before.
    """

    line: int
    record: int | None = None

    def __str__(self) -> str:
        return str(self.line) if self.record is None else f"{self.line}, record {self.record}"

    @property
    def key(self) -> str:
        """As part of a name: "3", or "1.5" of the fifth record on line 1."""
        return str(self.line) if self.record is None else f"{self.line}.{self.record}"


def read_raw(path: Path) -> Iterator[tuple[Place, Any]]:
    """Each record and its place.

    What cannot be read (an endless number, a string of Parquet that is not UTF-8, a date out of range, an object that
    gives one name different values) stands in its record, or as its record, as ``Unreadable``.

    Raises:
        ConfigError: the file is missing, of another type, cannot be read, or does not parse (with the line).
    """
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"Data file '{_shown(path)}' ends in '{printable(path.suffix, 20)}'. Records are read from .json, .jsonl "
            "and .parquet. Convert the file."
        )
    _check_file(path)
    return reader(path)


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _closed(path, error) from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _unreadable(path, line, f"is not UTF-8 text ({error.reason})") from error


def _read_json(path: Path) -> Iterator[tuple[Place, Any]]:
    """The elements of a JSON array one by one, so that each one's line is known."""
    text = _text(path)
    decoder = json.JSONDecoder(parse_int=_number, object_pairs_hook=_object)
    place = _skip_space(text, 0)
    if text[place : place + 1] != "[":
        found = text[place : place + 20] or "nothing"
        raise _unreadable(path, 1, f"begins with {found!r}, not with '[' (a record a line would be a .jsonl file)")
    line, counted, number, last_line = 1, 0, 0, 0
    place = _skip_space(text, place + 1)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            record, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise _unreadable(path, error.lineno, f"does not parse as JSON ({error.msg})") from error
        except RecursionError as error:
            raise _unreadable(path, line, "is nested too deeply") from error
        number += 1
        yield Place(line, number if line == last_line else None), record
        last_line = line
        place = _skip_space(text, end)
        if text[place : place + 1] == ",":
            place = _skip_space(text, place + 1)
            if text[place : place + 1] != "]":
                continue
        elif text[place : place + 1] == "]":
            continue
        line = text.count("\n", 0, place) + 1
        raise _unreadable(
            path, line, "does not parse as JSON (a record must be followed by ',' and a record, or by ']')"
        )
    if _skip_space(text, place + 1) != len(text):
        raise _unreadable(path, text.count("\n", 0, place) + 1, "goes on after the end of the array")


def _skip_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None  # it matches no space as well
    return match.end()


def _number(digits: str) -> int | Unreadable:
    return int(digits) if len(digits) <= MAX_DIGITS else Unreadable(f"a whole number of {len(digits)} digits")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Unreadable:
    """An object. Which of two values under one name is meant, nobody can know."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if value != values[name]:
                return Unreadable(f"an object that gives '{printable(name, 80)}' different values")
    return values


def _read_jsonl(path: Path) -> Iterator[tuple[Place, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield Place(number), json.loads(line, parse_int=_number, object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            raise _unreadable(path, number, f"does not parse as JSON ({error.msg} at column {error.colno})") from error
        except RecursionError as error:
            raise _unreadable(path, number, "is nested too deeply") from error


def _read_parquet(path: Path) -> Iterator[tuple[Place, Any]]:
    import pyarrow.parquet

    try:
        # damage is noticed where the writer stored checksums
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(batch_size=ROWS):
                for record in _rows(batch):
                    number += 1
                    yield Place(number), record
    except ConfigError:
        raise
    except Exception as error:  # whatever the reader raises on a file is wrong with the file
        raise ConfigError(
            f"Data file '{_shown(path)}' cannot be read as Parquet: {printable(str(error), 500)}. A complete Parquet "
            "file is expected. Write the file again."
        ) from error


def _check_columns(path: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"Data file '{_shown(path)}' has several columns named {printable(', '.join(twice), 300)}. Columns with "
            "different names are expected. Rename or remove one of them."
        )


def _rows(batch: Any) -> list[Any]:
    """The rows of a batch; where a value cannot be turned into Python's, cell by cell, so that only it is lost."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # strings that are not UTF-8, dates out of range
        names = batch.schema.names
        return [
            {name: _cell(batch.column(place), row) for place, name in enumerate(names)} for row in range(batch.num_rows)
        ]


def _cell(column: Any, row: int) -> Any:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError) as error:
        return Unreadable(f"a {column.type} that cannot be read ({type(error).__name__})")


def _closed(path: Path, error: Exception) -> ConfigError:
    cause = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"Data file '{_shown(path)}' cannot be read: {cause}. A file of records is expected. Correct the path, or the "
        "rights of the file."
    )


def _unreadable(path: Path, line: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{_shown(path)}:{line}: the file {problem}. An array of records (.json) or one record a line (.jsonl) is "
        "expected. Correct that line."
    )


def _shown(path: Path) -> str:
    return printable(str(path), 300)

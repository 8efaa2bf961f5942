"""Raw records with their place in the file: JSON arrays, JSON lines, Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError

_SPACE = " \t\r\n"


def read_raw(path: Path) -> Iterator[tuple[int, Any]]:
    """Each record and where it begins: the line (JSON, JSONL) or the row (Parquet), counted from 1.

    Raises:
        ConfigError: the file is missing, of another type, or does not parse (with the line).
    """
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"Data file '{path}' ends in '{path.suffix}'. Records are read from .json, .jsonl and .parquet. Convert "
            "the file."
        )
    if not path.is_file():
        raise ConfigError(
            f"Data file '{path}' does not exist. A file of records is expected. Correct the path, relative to the "
            "folder the command is run in."
        )
    return reader(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _unreadable(path, line, f"is not UTF-8 text ({error.reason})") from error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array one by one, so that each one's line is known."""
    text = _text(path)
    decoder = json.JSONDecoder()
    place = _skip_space(text, 0)
    if text[place : place + 1] != "[":
        found = text[place : place + 20] or "nothing"
        raise _unreadable(path, 1, f"begins with {found!r}, not with '[' (a record a line would be a .jsonl file)")
    line, counted = 1, 0
    place = _skip_space(text, place + 1)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            record, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise _unreadable(path, error.lineno, f"does not parse as JSON ({error.msg})") from error
        except RecursionError as error:
            raise _unreadable(path, line, "is nested too deeply") from error
        yield line, record
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
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise _unreadable(path, number, f"does not parse as JSON ({error.msg} at column {error.colno})") from error
        except RecursionError as error:
            raise _unreadable(path, number, "is nested too deeply") from error


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"Data file '{path}' cannot be read as Parquet: {error}. A complete Parquet file is expected. Write the "
            "file again."
        ) from error


def _unreadable(path: Path, line: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}:{line}: the file {problem}. An array of records (.json) or one record a line (.jsonl) is expected. "
        "Correct that line."
    )

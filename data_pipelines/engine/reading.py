"""Annotation files in every form that data sets are published in: each row, and where it stands."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordPlace, read_json_object, read_raw, root_of
from vlm_pg.errors import ConfigError, printable

Reader = Callable[[Path], Iterator[tuple[RecordPlace, Any]]]
# Characters. Behind a quote that nobody closed the rest of the file is one cell.
_LONGEST_CELL = 1 << 24


def read_rows(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """Rows of a table: JSON array, JSON lines, CSV with a line of column names, Parquet, a folder of Parquet or Arrow.

    Raises:
        ConfigError: it cannot be read as what it is called.
    """
    return read_csv(path) if path.suffix.lower() == ".csv" else read_raw(path)


def read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[RecordPlace, Any]]:
    """Rows of a CSV file as RFC 4180 writes them, numbered by the line they end on.

    A row of more or fewer cells than there are columns has moved values, or lost some: it is ``Unreadable``.

    Raises:
        ConfigError: it cannot be read (with the line), or has two columns of one name.
    """
    csv.field_size_limit(_LONGEST_CELL)  # the module's own is 131,072
    begins = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names: list[str] = []
            for cells in reader:
                begins = reader.line_num + 1
                if not cells:  # an empty line
                    continue
                if not names:
                    names = _column_names(path, cells)
                    continue
                row = {name: cell for name, cell in zip(names, cells, strict=False) if name}
                fault = f"a line of {len(cells)} cells below {len(names)} column names"
                yield (
                    RecordPlace(reader.line_num),
                    row if len(cells) == len(names) else Unreadable(fault, "bad_csv_row"),
                )
    except csv.Error as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}:{begins}' cannot be read as CSV: {error}, in the row that begins "
            "there. A cell that begins with a quote must end with one; those inside it are doubled. Correct that row."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' cannot be read as CSV: {error}. A UTF-8 file with a line of "
            "column names is expected. Correct the path, or write the file again."
        ) from error


def keyed_rows(key: str, reader: Callable[[Path], Iterator[tuple[RecordPlace, str, Any]]] = read_json_object) -> Reader:
    """A reader of JSON objects that hold a row under each name: the name becomes the row's field ``key``.

    ``{"video_1": {"mc_question": []}}`` read by ``keyed_rows("video")`` is one row, ``{"video": "video_1",
    "mc_question": []}``. A row whose own field of that name says something else is ``Unreadable``. A row that is no
    object stays what it is, and is refused later.
    """

    def read(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
        for place, name, row in reader(path):
            own = row.get(key, name) if isinstance(row, Mapping) else name
            if own != name and str(own) != name:
                came = (
                    f"called '{printable(name, 80)}' in its file and '{printable(str(own), 80)}' in its field '{key}'"
                )
                yield place, Unreadable(came, "two_names")
            else:
                yield place, {key: name, **row} if isinstance(row, Mapping) else row

    return read


def one_object(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """The reader of files that hold one row each: a JSON object. Its fields gain ``file``, the path of the file.

    One that gives a name several values, or has a field ``file`` of its own, is ``Unreadable``.
    """
    row: dict[str, Any] = {}
    fault = None
    for _, name, value in read_json_object(path):
        if row.setdefault(name, value) != value:
            fault = Unreadable(f"an object that gives '{printable(name, 80)}' different values")
    if "file" in row:
        fault = fault or Unreadable("an object with a field 'file', which is where its file's path goes", "two_names")
    yield RecordPlace(1), fault or {**row, "file": str(path)}


def text_lines(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """The reader of text files of one row a line: ``{"line": "..."}``; empty lines are none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield RecordPlace(number), {"line": line.rstrip("\r\n")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' cannot be read as text: {error}. A UTF-8 file of one row a line "
            "is expected. Correct the path, or write the file again."
        ) from error


def files_beside(path: Path, patterns: Sequence[str]) -> list[Path]:
    """Files that these glob patterns name in the folder of an annotation file, or in a folder of Parquet shards."""
    root = root_of(path)
    return [file for pattern in patterns for file in sorted(root.glob(pattern)) if file.is_file()]


def _column_names(path: Path, names: list[str]) -> list[str]:
    """Those without a name may be several: no row is asked for them."""
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' has several columns named {printable(', '.join(twice), 300)}. "
            "Columns with different names are expected. Rename or remove one of them."
        )
    return names

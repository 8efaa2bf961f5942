"""Rows of Parquet files, and of the Arrow files in folders that ``datasets`` saves: each value, or what is wrong.

pyarrow reads both. ``datasets`` itself would convert Parquet into a cache beside the home folder, without the pages'
checksums, and lose a file for one value that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlm_pg.data.columns import as_written, written_columns
from vlm_pg.data.embedded import media_columns, with_media
from vlm_pg.data.prepared import check_version
from vlm_pg.data.unreadable import Unreadable
from vlm_pg.errors import ConfigError, printable

ROWS = 1024
# Rows with media inside may hold a whole video each.
MEDIA_ROWS = 8
# How an Arrow stream ends (Arrow's columnar format, "IPC Streaming Format").
_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Each row of a Parquet file.

    Raises:
        ConfigError: it cannot be read, or has two columns of one name.
    """
    import pyarrow.parquet

    try:
        # damage is noticed where the writer stored checksums
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow.names)
            check_version(path, file.schema_arrow.metadata)
            size, read = _reader(file.schema_arrow)
            for batch in file.iter_batches(batch_size=size):
                for record in _rows(batch):
                    yield read(record)
    except ConfigError:
        raise
    except Exception as error:  # whatever the reader raises on a file is wrong with the file
        raise _unreadable(path, "Parquet", error) from error


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Each row of an Arrow stream; its offsets are checked before anything is read by them.

    Raises:
        ConfigError: see ``read_parquet``.
    """
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            _check_columns(path, stream.schema.names)
            size, read = _reader(stream.schema)
            for batch in stream:
                batch.validate()
                for start in range(0, batch.num_rows, size):
                    for record in _rows(batch.slice(start, size), check=True):
                        yield read(record)
            _check_end(file)
    except ConfigError:
        raise
    except Exception as error:
        raise _unreadable(path, "Arrow", error) from error


def count_rows(path: Path) -> int:
    """Rows of a Parquet file or Arrow stream.

    Raises:
        ConfigError: it cannot be read.
    """
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            return sum(batch.num_rows for batch in stream)
    except Exception as error:  # whatever the reader raises on a file is wrong with the file
        raise _unreadable(path, "Parquet" if path.suffix == ".parquet" else "Arrow", error) from error


def _reader(schema: Any) -> tuple[int, Callable[[dict[str, Any]], dict[str, Any]]]:
    """How many rows to read at once, and what makes of a row's values those that were meant."""
    media, written = media_columns(schema), written_columns(schema)

    def read(record: dict[str, Any]) -> dict[str, Any]:
        record = with_media(record, media) if media else record
        return as_written(record, written) if written else record

    return MEDIA_ROWS if media else ROWS, read


def _check_end(file: Any) -> None:
    """A stream that was cut off between two batches reads as one with fewer rows, but has no end."""
    end, size = file.tell(), file.size()
    file.seek(max(0, end - len(_END)))
    if end != size or file.read(len(_END)) != _END:
        raise ValueError(f"it ends at byte {end} of {size} without the mark of an end")


def _unreadable(path: Path, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"Data file '{_shown(path)}' cannot be read as {what}: {printable(str(error), 500)}. A complete {what} "
        "file is expected. Write the file again."
    )


def _check_columns(path: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"Data file '{_shown(path)}' has several columns named {printable(', '.join(twice), 300)}. Columns with "
            "different names are expected. Rename or remove one of them."
        )


def _rows(batch: Any, check: bool = False) -> list[Any]:
    """The rows of a batch; where a value cannot be turned into Python's, cell by cell, so that only it is lost.

    ``check``: first see whether everything lies where the batch says; a reader of Parquet has built that itself.
    """
    try:
        if check:
            batch.validate(full=True)
        return batch.to_pylist()
    except (ValueError, OverflowError):  # strings that are not UTF-8, dates out of range, offsets to nowhere
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        return [{name: _cell(column, row, check) for name, column in columns.items()} for row in range(batch.num_rows)]


def _cell(column: Any, row: int, check: bool) -> Any:
    try:
        if check:
            column.slice(row, 1).validate(full=True)
        return column[row].as_py()
    except (ValueError, OverflowError) as error:
        return Unreadable(f"a {column.type} that cannot be read ({type(error).__name__})")


def _shown(path: Path) -> str:
    return printable(str(path), 300)

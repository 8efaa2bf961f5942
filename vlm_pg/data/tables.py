"""Rows of Parquet files and of the Arrow files that ``datasets`` saves.

pyarrow reads both. ``datasets`` itself would convert Parquet into a cache in the home folder, without checking the
pages' checksums, and lose a whole file for one value that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.data.fields import Unreadable
from vlm_pg.data.prepared import check_version
from vlm_pg.errors import ConfigError, printable
from vlm_pg.types import MediaKind


@dataclass(frozen=True)
class Embedded:
    """A medium in the place of its path.

    Args:
        data: the file's content.
        name: what the file was called where the data set was made; nothing to rely on.
        kind: what the data set's features say it is; None where they do not.
    """

    data: bytes = field(repr=False)
    name: str | None = None
    kind: MediaKind | None = None


def media_columns(schema: Any) -> dict[str, MediaKind | None]:
    """The columns of an Arrow schema that hold media, or lists of them, and what kind its features call them.

    Without features, every column counts whose values are a file's bytes and path.
    """
    columns = [name for name, column in zip(schema.names, schema.types, strict=True) if _holds_files(column)]
    if not columns:
        return {}
    features = features_of(schema)
    if features is None:
        return dict.fromkeys(columns)
    described = {name: _innermost(features.get(name)) for name in columns}
    # A column that the features leave out is one they describe by its shape alone; others are sounds, documents, ...
    return {name: _kind(one) for name, one in described.items() if isinstance(one, dict) or _kind(one) is not None}


def with_media(record: Mapping[str, Any], columns: Mapping[str, MediaKind | None]) -> dict[str, Any]:
    """The record with ``Embedded`` in these columns; what has a path and no content is that path, as text."""
    return {name: _medium(value, columns[name]) if name in columns else value for name, value in record.items()}


def embedded_in(record: Any) -> list[str]:
    """The fields of a record that hold media."""
    if not isinstance(record, Mapping):
        return []
    return [name for name, value in record.items() if _has_embedded(value)]


def _has_embedded(value: Any) -> bool:
    return isinstance(value, Embedded) or (isinstance(value, list) and any(isinstance(one, Embedded) for one in value))


def _medium(value: Any, kind: MediaKind | None) -> Any:
    if isinstance(value, list):
        return [_medium(one, kind) for one in value]
    if not isinstance(value, dict):
        return value  # none, or what cannot be read
    content, path = value.get("bytes"), value.get("path")
    return path if content is None else Embedded(content, path, kind)


def _holds_files(column: Any) -> bool:
    import pyarrow.types as types

    while types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        column = column.value_type
    if not types.is_struct(column) or {one.name for one in column} != {"bytes", "path"}:
        return False
    content, path = column.field("bytes").type, column.field("path").type
    is_content = types.is_binary(content) or types.is_large_binary(content) or types.is_null(content)
    return is_content and (types.is_string(path) or types.is_large_string(path) or types.is_null(path))


def features_of(schema: Any) -> Any:
    """The data set's features; None if the table carries none, or none that can be read."""
    if not schema.metadata or b"huggingface" not in schema.metadata:
        return None
    from datasets import Features

    try:
        return Features.from_arrow_schema(schema)
    except Exception:  # whatever a description of features makes the package raise, the columns are there all the same
        return None


def _innermost(feature: Any) -> Any:
    from datasets import LargeList, List

    while isinstance(feature, List | LargeList):
        feature = feature.feature
    return feature


def _kind(feature: Any) -> MediaKind | None:
    from datasets import Image, Video

    return "image" if isinstance(feature, Image) else "video" if isinstance(feature, Video) else None


Convert = Callable[[Any], Any]


class Label(str):
    """The name of a class, which knows its number: Label("dog", 1) == "dog", Label("dog", 1).number == 1."""

    number: int

    def __new__(cls, name: str, number: int) -> Label:
        label = super().__new__(cls, name)
        label.number = number
        return label

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return str(self), self.number


def written_columns(schema: Any) -> dict[str, Convert]:
    """The columns of an Arrow schema that hold classes or numbers of few bits, at any depth, and what reads them."""
    features = _features_with_classes(schema)
    found = {
        name: _converter(column, features.get(name)) for name, column in zip(schema.names, schema.types, strict=True)
    }
    return {name: reader for name, reader in found.items() if reader is not None}


def as_written(record: Mapping[str, Any], columns: Mapping[str, Convert]) -> dict[str, Any]:
    """The record with the values of these columns as they were written."""
    return {name: columns[name](value) if name in columns else value for name, value in record.items()}


def shortest(value: float, kind: type[np.floating[Any]]) -> float:
    """The number of fewest digits that is held as ``value`` in this precision; the value itself if it is not of it.

    shortest(24.296875, np.float16) == 24.3. Whole numbers stay: of large ones fewer digits would be another one.
    """
    if value.is_integer():
        return value
    with np.errstate(over="ignore"):
        held = kind(value)
    return float(str(held)) if float(held) == value else value


def _features_with_classes(schema: Any) -> Mapping[str, Any]:
    if b'"ClassLabel"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return {}  # to read them takes a package that takes its time
    features = features_of(schema)
    return {} if features is None else features


def _converter(column: Any, feature: Any) -> Convert | None:
    import pyarrow.types as types

    if names := _class_names(feature):
        return partial(_label, names)
    if types.is_float32(column) or types.is_float16(column):
        return partial(_number, np.float32 if types.is_float32(column) else np.float16)
    if types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        one = _converter(column.value_type, getattr(feature, "feature", None))
        return None if one is None else partial(_each, one)
    if types.is_struct(column):
        inner = feature if isinstance(feature, Mapping) else {}
        fields = {field.name: _converter(field.type, inner.get(field.name)) for field in column}
        readers = {name: reader for name, reader in fields.items() if reader is not None}
        return partial(_fields, readers) if readers else None
    return None


def _class_names(feature: Any) -> Sequence[str]:
    if type(feature).__name__ != "ClassLabel":
        return ()
    return tuple(feature.names or ())


def _label(names: Sequence[str], value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value  # none, or what cannot be read
    if value == -1:  # datasets' number of rows without a class
        return None
    if not 0 <= value < len(names):
        return Unreadable(f"class {value} of {len(names)}")
    return Label(names[value], value)


def _number(kind: type[np.floating[Any]], value: Any) -> Any:
    return shortest(value, kind) if isinstance(value, float) else value


def _each(one: Convert, value: Any) -> Any:
    return [one(item) for item in value] if isinstance(value, list) else value


def _fields(readers: Mapping[str, Convert], value: Any) -> Any:
    return as_written(value, readers) if isinstance(value, dict) else value


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

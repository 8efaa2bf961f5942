"""Rows of Parquet files and of the Arrow files that ``datasets`` saves.

pyarrow reads both. ``datasets`` itself would convert Parquet into a cache in the home folder, without checking the
pages' checksums, and lose a whole file for one value that cannot be read.

Values come as they were written: the name of a class, not its number (``datasets``' ClassLabel); 24.3, not the nearest
single precision number 24.299999237060547; media as ``Embedded``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_pg.data.fields import Unreadable
from vlm_pg.data.prepared import check_version
from vlm_pg.errors import ConfigError, printable
from vlm_pg.types import MediaKind

if TYPE_CHECKING:
    import numpy as np

ROWS = 1024
# Rows with media inside may hold a whole video each.
MEDIA_ROWS = 8
# The end of an Arrow stream (Arrow's columnar format, "IPC Streaming Format").
_END = b"\xff\xff\xff\xff\0\0\0\0"
Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Embedded:
    """A medium instead of its path, as ``datasets`` stores Image and Video features.

    Args:
        data: the file's content.
        name: of the file where the data set was made; not reliable.
        kind: by the data set's features; None where they do not tell.
    """

    data: bytes = field(repr=False)
    name: str | None = None
    kind: MediaKind | None = None


class Label(str):
    """The name of a class with its number: Label("dog", 1) == "dog", Label("dog", 1).number == 1."""

    number: int

    def __new__(cls, name: str, number: int) -> Label:
        label = super().__new__(cls, name)
        label.number = number
        return label

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return str(self), self.number


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Each row of a Parquet file. Raises ConfigError: it cannot be read, or has two columns of one name."""
    import pyarrow.parquet

    # damage is noticed where the writer stored checksums
    with _reading(path, "Parquet"), pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        refuse_repeated(path, file.schema_arrow.names)
        check_version(path, file.schema_arrow.metadata)
        size, read = _row_reader(file.schema_arrow)
        for batch in file.iter_batches(batch_size=size):
            yield from map(read, _rows(batch))


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Each row of an Arrow stream, whose offsets are validated first. Raises as ``read_parquet``."""
    import pyarrow

    with _reading(path, "Arrow"), pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        refuse_repeated(path, stream.schema.names)
        size, read = _row_reader(stream.schema)
        for batch in stream:
            batch.validate()
            for start in range(0, batch.num_rows, size):
                yield from map(read, _rows(batch.slice(start, size), check=True))
        # A stream that was cut off between two batches reads as one with fewer rows, but has no end.
        end, length = file.tell(), file.size()
        file.seek(max(0, end - len(_END)))
        if end != length or file.read(len(_END)) != _END:
            raise ValueError(f"it ends at byte {end} of {length} without the mark of an end")


def count_rows(path: Path) -> int:
    """Rows of a Parquet file or Arrow stream. Raises ConfigError: it cannot be read."""
    import pyarrow.parquet

    if path.suffix == ".parquet":
        with _reading(path, "Parquet"):
            return int(pyarrow.parquet.read_metadata(path).num_rows)
    with _reading(path, "Arrow"), pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        return sum(batch.num_rows for batch in stream)


def _row_reader(schema: Any) -> tuple[int, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Batch size, and the conversion of a row's stored values."""
    media, written = media_columns(schema), written_columns(schema)

    def read(record: dict[str, Any]) -> dict[str, Any]:
        if media:
            record = {name: _medium(one, media[name]) if name in media else one for name, one in record.items()}
        return _converted(record, written) if written else record

    return MEDIA_ROWS if media else ROWS, read


def _rows(batch: Any, check: bool = False) -> list[Any]:
    """The rows of a batch; where a value cannot be converted, cell by cell, so that only it is lost.

    ``check``: validate the batch first; one that a reader of Parquet has built is valid.
    """
    try:
        if check:
            batch.validate(full=True)
        return batch.to_pylist()
    except (ValueError, OverflowError):  # strings that are not UTF-8, dates out of range, invalid offsets
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        return [{name: _cell(column, row, check) for name, column in columns.items()} for row in range(batch.num_rows)]


def _cell(column: Any, row: int, check: bool) -> Any:
    try:
        if check:
            column.slice(row, 1).validate(full=True)
        return column[row].as_py()
    except (ValueError, OverflowError) as error:
        return Unreadable(f"a {column.type} that cannot be read ({type(error).__name__})")


def _reading(path: Path, form: str) -> AbstractContextManager[None]:
    """Around reading a file of a form ("Parquet", "Arrow")."""
    shown = f"Data file '{printable(str(path), 300)}' cannot be read as {form}"
    return naming_damage(shown, f"A complete {form} file is expected. Write the file again.")


@contextmanager
def naming_damage(file: str, remedy: str, characters: int = 500) -> Iterator[None]:
    """Make whatever pyarrow raises on a file a ConfigError: "FILE: ERROR. REMEDY", the error cut to ``characters``."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{file}: {printable(str(error), characters)}. {remedy}") from error


def refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Refuse two columns of one name. Raises ConfigError."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' has several columns named {printable(', '.join(repeated), 300)}. "
            "Columns with different names are expected. Rename or remove one of them."
        )


def features_of(schema: Any) -> Any:
    """The data set's features; None if the table has none, or none that can be read."""
    if not schema.metadata or b"huggingface" not in schema.metadata:
        return None
    from datasets import Features

    try:
        return Features.from_arrow_schema(schema)
    except Exception:  # the columns can be read, whatever a description of features makes the package raise
        return None


def media_columns(schema: Any) -> dict[str, MediaKind | None]:
    """The columns of an Arrow schema that hold media, or lists of them, and their kinds by the features.

    Without features, every column of structs with bytes and path counts.
    """
    columns = [name for name, column in zip(schema.names, schema.types, strict=True) if _holds_files(column)]
    if not columns:
        return {}
    features = features_of(schema)
    if features is None:
        return dict.fromkeys(columns)
    from datasets import Image, LargeList, List, Video

    found: dict[str, MediaKind | None] = {}
    for name in columns:
        feature = features.get(name)
        while isinstance(feature, List | LargeList):
            feature = feature.feature
        is_image, is_video = isinstance(feature, Image), isinstance(feature, Video)
        kind: MediaKind | None = "image" if is_image else "video" if is_video else None
        # A dict describes the column's structure only; other features are audio, documents, ...
        if kind is not None or isinstance(feature, dict):
            found[name] = kind
    return found


def _holds_files(column: Any) -> bool:
    import pyarrow.types as types

    while _is_list(column):
        column = column.value_type
    if not types.is_struct(column) or {one.name for one in column} != {"bytes", "path"}:
        return False
    content, path = column.field("bytes").type, column.field("path").type
    is_content = types.is_binary(content) or types.is_large_binary(content) or types.is_null(content)
    return is_content and (types.is_string(path) or types.is_large_string(path) or types.is_null(path))


def _is_list(column: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column))


def _medium(value: Any, kind: MediaKind | None) -> Any:
    """``Embedded`` for a stored medium; its path where only that is stored."""
    if isinstance(value, list):
        return [_medium(one, kind) for one in value]
    if not isinstance(value, dict):
        return value  # null, or unreadable
    return value["path"] if value["bytes"] is None else Embedded(value["bytes"], value["path"], kind)


def embedded_in(record: Any) -> list[str]:
    """The fields of a record that hold media."""
    if not isinstance(record, Mapping):
        return []
    values = {name: value if isinstance(value, list) else [value] for name, value in record.items()}
    return [name for name, some in values.items() if any(isinstance(one, Embedded) for one in some)]


def written_columns(schema: Any) -> dict[str, Convert]:
    """Conversions of the columns of an Arrow schema that hold classes or numbers of few bits, at any depth."""
    # features take a package that is slow to import
    has_classes = b'"ClassLabel"' in (schema.metadata or {}).get(b"huggingface", b"")
    features = (features_of(schema) if has_classes else None) or {}
    columns = zip(schema.names, schema.types, strict=True)
    found = {name: _converter(column, features.get(name)) for name, column in columns}
    return {name: convert for name, convert in found.items() if convert is not None}


def _converter(column: Any, feature: Any) -> Convert | None:
    import numpy as np
    import pyarrow.types as types

    if type(feature).__name__ == "ClassLabel" and feature.names:
        return partial(_label, tuple(feature.names))
    if types.is_float32(column) or types.is_float16(column):
        kind = np.float32 if types.is_float32(column) else np.float16
        return lambda value: shortest(value, kind) if isinstance(value, float) else value
    if _is_list(column):
        one = _converter(column.value_type, getattr(feature, "feature", None))
        return one and (lambda value: [one(item) for item in value] if isinstance(value, list) else value)
    if types.is_struct(column):
        inner = feature if isinstance(feature, Mapping) else {}
        fields = {field.name: _converter(field.type, inner.get(field.name)) for field in column}
        converters = {name: convert for name, convert in fields.items() if convert is not None}
        return (lambda value: _converted(value, converters)) if converters else None
    return None


def _converted(value: Any, converters: Mapping[str, Convert]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: converters[name](one) if name in converters else one for name, one in value.items()}


def _label(names: Sequence[str], value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value  # null, or unreadable
    if value == -1:  # datasets' number of rows without a class
        return None
    if not 0 <= value < len(names):
        return Unreadable(f"class {value} of {len(names)}")
    return Label(names[value], value)


def shortest(value: float, kind: type[np.floating[Any]]) -> float:
    """The number with the fewest digits that has this value in this precision; the value itself if it has not.

    shortest(24.296875, np.float16) == 24.3. Whole numbers stay: large ones with fewer digits would be other numbers.
    """
    import numpy as np

    if value.is_integer():
        return value
    with np.errstate(over="ignore"):
        held = kind(value)
    return float(str(held)) if float(held) == value else value

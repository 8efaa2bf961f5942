"""Values of a table as they were written: the name of a class, not its number; 24.3, not the nearest single precision.

Tables hold classes as numbers (``datasets``' ClassLabel, with the names in the table's features), and numbers in fewer
bits than Python's own, which show their rounding there: 24.3 in 32 bits is 24.299999237060547.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from vlm_pg.data.embedded import features_of
from vlm_pg.data.unreadable import Unreadable

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
    found = {name: _reader(column, features.get(name)) for name, column in zip(schema.names, schema.types, strict=True)}
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


def _reader(column: Any, feature: Any) -> Convert | None:
    import pyarrow.types as types

    if names := _class_names(feature):
        return partial(_label, names)
    if types.is_float32(column) or types.is_float16(column):
        return partial(_number, np.float32 if types.is_float32(column) else np.float16)
    if types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        one = _reader(column.value_type, getattr(feature, "feature", None))
        return None if one is None else partial(_each, one)
    if types.is_struct(column):
        inner = feature if isinstance(feature, Mapping) else {}
        fields = {field.name: _reader(field.type, inner.get(field.name)) for field in column}
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

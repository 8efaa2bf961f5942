"""Media that stand inside rows of a table, as ``datasets`` stores its Image and Video features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

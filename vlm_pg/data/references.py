"""The media that a record names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from vlm_pg.data.fields import fault
from vlm_pg.types import MediaKind, MediaRef


def media_of(record: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    """The media in order; ``data_type`` holds for all of them or is a list with one entry for each."""
    path = record.get("path")
    paths = [path] if isinstance(path, str) else [] if path is None else path
    if not isinstance(paths, list) or not all(isinstance(item, str) for item in paths):
        raise fault("wrong_type", f"'path' is a {type(path).__name__}", "A string or a list of strings", "it")
    written = record.get("data_type")
    if written is None:
        raise fault("missing_field", "'data_type' is missing", "image, video or text", "the record")
    if written == "text":
        if any(paths):
            raise fault("media_in_text_record", f"'data_type' is text but 'path' is {paths}", "An empty path", "either")
        return ()
    kinds = written if isinstance(written, list) else [written] * len(paths)
    allowed = get_args(MediaKind)
    if not all(isinstance(kind, str) and kind in allowed for kind in (kinds if kinds is written else [written])):
        expected = "image, video, text, or a list of the first two"
        raise fault("unknown_data_type", f"'data_type' is {written!r}", expected, "it")
    if not paths or not all(paths):
        raise fault("missing_field", "'path' is missing or empty", f"The path of the {written}", "the record")
    if len(kinds) != len(paths):
        raise fault("wrong_type", f"'data_type' lists {len(kinds)} kinds for {len(paths)} paths", "One for each", "it")
    return tuple(MediaRef(kind, item) for kind, item in zip(kinds, paths, strict=True))

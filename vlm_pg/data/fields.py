"""The fields of a record: of the type they should have, in whole characters, or refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlm_pg.data.unreadable import Unreadable
from vlm_pg.errors import SampleError

_SURROGATE = re.compile("[\ud800-\udfff]")
_REQUIRED: Any = object()


def fault(reason: str, came: str, allowed: str, correct: str) -> SampleError:
    """The refusal of a record, in the words that all of them have."""
    return SampleError(reason, f"{came}. {allowed} is expected. Correct {correct}, or remove the record.")


def field(record: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """A field of the given type; absent and null count the same."""
    value = record.get(name)
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'{name}' is {value.what}", f"A {kind.__name__} that can be read", "it")
    if value is None:
        if default is _REQUIRED:
            raise fault("missing_field", f"'{name}' is missing", f"A {kind.__name__} under that name", "the record")
        return default
    if not isinstance(value, kind):
        raise fault("wrong_type", f"'{name}' is a {type(value).__name__}", f"A {kind.__name__}", "it")
    return value


def id_of(record: Mapping[str, Any]) -> str:
    """The record's own name: its number or string under ``problem_id``."""
    value = record.get("problem_id")
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'problem_id' is {value.what}", "A whole number or a string", "it")
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise fault("wrong_type", f"'problem_id' is a {type(value).__name__}", "A whole number or a string", "it")
    if value is None or not str(value).strip():
        raise fault("missing_field", "'problem_id' is missing", "A number or name of its own", "the record")
    return str(value)


def check_text(name: str, text: str) -> None:
    """Refuse halves of characters: no tokenizer takes them, and which character it was cannot be known."""
    found = _SURROGATE.search(text)
    if found:
        raise fault(
            "not_unicode",
            f"'{name}' holds half of a character (\\u{ord(found[0]):04x}, at {found.start()}), as text that was cut "
            "inside an emoji does",
            "Whole Unicode characters",
            "it",
        )

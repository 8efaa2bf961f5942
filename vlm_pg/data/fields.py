"""Fields of a record, checked for type and Unicode; ``details``; values that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_pg.errors import SampleError


@dataclass(frozen=True)
class Unreadable:
    """Stands for the value, so that only a record that needs it is lost.

    Unreadable("a whole number of 5000 digits")

    Args:
        what: it is.
        reason: with which a row is refused that is this as a whole.
    """

    what: str
    reason: str = "unreadable_value"


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


# More is no description of a question, and would be held for every question of a set.
LONGEST_DETAILS = 20_000


def details_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's ``details``: an object, or the JSON of one as text; {} without them.

    Raises:
        SampleError: they are none, or longer than ``LONGEST_DETAILS`` characters.
    """
    value = record.get("details")
    if value is None or value == "":
        return {}
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'details' is {value.what}", "An object that can be read", "it")
    if isinstance(value, str):
        if len(value) > LONGEST_DETAILS:
            raise _too_long(len(value))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise fault("wrong_type", "'details' is a text that is no JSON", "An object, or its JSON", "it") from None
    if not isinstance(value, Mapping):
        raise fault("wrong_type", f"'details' is a {type(value).__name__}", "An object, or its JSON", "it")
    written = written_details(value)
    if len(written) > LONGEST_DETAILS:
        raise _too_long(len(written))
    check_text("details", written)
    return {str(name): one for name, one in json.loads(written).items()} if written else {}


def written_details(details: Mapping[str, Any]) -> str:
    """The JSON of details, "" without any; keys in order, so that equal details are equal texts.

    Raises:
        SampleError: a value that JSON does not have.
    """
    if not details:
        return ""
    try:
        return json.dumps(dict(details), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        expected = "Texts, finite numbers, true, false, null, lists and objects of them"
        raise fault("wrong_type", "'details' holds a value that JSON does not have", expected, "it") from None


def _too_long(length: int) -> Exception:
    expected = f"At most {LONGEST_DETAILS:,}"
    return fault("details_too_long", f"'details' has {length:,} characters", expected, "them")

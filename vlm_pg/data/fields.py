"""Fields of a record, checked for type and Unicode; ``details``; values that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_pg.errors import SampleError

# More is no description of a question, and would be held for every question of a set.
LONGEST_DETAILS = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Unreadable:
    """A value that cannot be read, so that only a record that needs it is lost; ``reason``: of refusing a whole row.

    Unreadable("a whole number of 5000 digits")
    """

    what: str
    reason: str = "unreadable_value"


def fault(reason: str, came: str, allowed: str, correct: str) -> SampleError:
    """The refusal of a record: "CAME. ALLOWED is expected. Correct CORRECT, or remove the record."."""
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
    """The record's ``problem_id``, a number or string, as text."""
    value = record.get("problem_id")
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'problem_id' is {value.what}", "A whole number or a string", "it")
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise fault("wrong_type", f"'problem_id' is a {type(value).__name__}", "A whole number or a string", "it")
    if value is None or not str(value).strip():
        raise fault("missing_field", "'problem_id' is missing", "A number or name of its own", "the record")
    return str(value)


def check_text(name: str, text: str) -> None:
    """Refuse lone surrogates: no tokenizer takes them, and the original character is unknown."""
    found = _SURROGATE.search(text)
    if found:
        raise fault(
            "not_unicode",
            f"'{name}' holds half of a character (\\u{ord(found[0]):04x}, at {found.start()}), as text that was cut "
            "inside an emoji does",
            "Whole Unicode characters",
            "it",
        )


def details_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's ``details``, further published values of a question: an object, or its JSON as text; {} without.

    Raises:
        SampleError: they are no object, or longer than ``LONGEST_DETAILS`` characters.
    """
    value = record.get("details")
    if value is None or value == "":
        return {}
    if isinstance(value, Unreadable):
        raise fault("unreadable_value", f"'details' is {value.what}", "An object that can be read", "it")
    if isinstance(value, str):
        _check_length(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise fault("wrong_type", "'details' is a text that is no JSON", "An object, or its JSON", "it") from None
    if not isinstance(value, Mapping):
        raise fault("wrong_type", f"'details' is a {type(value).__name__}", "An object, or its JSON", "it")
    written = written_details(value)
    _check_length(written)
    check_text("details", written)
    return {str(name): one for name, one in json.loads(written).items()} if written else {}


def written_details(details: Mapping[str, Any]) -> str:
    """The JSON of details with sorted keys, so that equal details are equal texts; "" without any.

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


def _check_length(written: str) -> None:
    if len(written) > LONGEST_DETAILS:
        expected = f"At most {LONGEST_DETAILS:,}"
        raise fault("details_too_long", f"'details' has {len(written):,} characters", expected, "them")

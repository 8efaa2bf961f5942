"""What an evaluation set publishes of a question beside its text and answer: an object of plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlm_pg.data.fields import check_text, fault
from vlm_pg.data.unreadable import Unreadable

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

"""Text that came from a model or a data set, made safe to show; nested settings as lines of a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Bidirectional controls can make text read in another order than it is written; the rest moves the cursor,
# rings the bell or starts a terminal escape sequence.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """``text`` with control characters shown as symbols (ESC becomes U+241B); newlines and tabs stay."""
    return _CONTROL.sub(_symbol, text)


def _symbol(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def one_line(text: str, limit: int | None = None) -> str:
    """``visible`` text on one line; beyond ``limit`` characters the middle gives way to an ellipsis."""
    flat = " ".join(visible(text).split())
    if limit is None or len(flat) <= limit:
        return flat
    tail = limit // 3
    return f"{flat[: limit - tail - 3]}...{flat[len(flat) - tail :]}"


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values under dotted keys; an empty mapping is a value.

    dict(dotted({"media": {"fps": 2.0}, "sets": ["a"]})) == {"media.fps": 2.0, "sets": ["a"]}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""The result of an answer checker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Accuracy in [0, 1], or None where the gold answer cannot be used; and the reason.

    Verdict(1.0)
    Verdict(None, "gold answer 'unknown' has no number")
    """

    value: float | None
    note: str = ""


def shorten(text: str, limit: int = 80) -> str:
    """``text`` quoted for a note: control characters escaped, at most ``limit`` characters of it."""
    return repr(text if len(text) <= limit else text[:limit] + "...")

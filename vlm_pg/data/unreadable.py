"""A value of a record that its file holds and nobody can read."""

from __future__ import annotations

from dataclasses import dataclass


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

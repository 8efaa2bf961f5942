"""Contracts of graders and readers: settings, verdicts, readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from vlm_pg.settings import Settings
from vlm_pg.types import Sample


@dataclass(frozen=True)
class Verdict:
    """Accuracy in [0, 1], or None when it has no value because the gold answer cannot be used; and why.

    Verdict(1.0)
    Verdict(None, "gold answer 'unknown' has no number")
    """

    value: float | None
    note: str = ""


def shorten(text: str, limit: int = 80) -> str:
    """``text`` quoted for a note: control characters escaped, at most ``limit`` characters of it."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


@dataclass(frozen=True)
class Reading:
    """What a reader understood of one output, and what that is worth.

    ``answer``: as one would write it down, for people and for majority votes: "C", "12.5", "[3.2, 9.1]", "yes"; equal
    answers are spelled alike. None: the output gives no answer, or several. ``score`` in [0, 1]; None where the
    question itself has no value (its gold answer cannot be used). ``counts``: False where a published rule leaves the
    output out of its denominator. ``note``: why, in a few words.
    """

    answer: str | None
    score: float | None
    note: str = ""
    counts: bool = True


# (question, output without special tokens, whether it was cut off by the length limit) -> what it says
Reader = Callable[[Sample, str, bool], Reading]


class CheckerSettings(Settings):
    """Section ``reward.checker``: processes for what may hang or run away."""

    workers: int = Field(2, ge=1, le=256, description="Number of processes.")
    timeout_seconds: float = Field(
        5.0, gt=0.0, description="Time limit for checking one answer; on timeout the answer has no value."
    )
    memory_mb: int = Field(
        2048, ge=256, description="Address space in MiB that a process may use beyond what it uses at its start."
    )


class GraderSettings(Protocol):
    """Tolerances of graders; section ``reward`` has them (``GraderSettings``)."""

    @property
    def numerical_decimal_places(self) -> int: ...
    @property
    def numerical_tolerance(self) -> float: ...
    @property
    def ocr_case_sensitive(self) -> bool: ...
    @property
    def checker(self) -> CheckerSettings: ...

"""Settings of graders."""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from vlm_pg.settings import Settings


class CheckerSettings(Settings):
    """Section ``reward.checker``: processes for what may hang or run away."""

    workers: int = Field(2, ge=1, le=256, description="Processes.")
    timeout_seconds: float = Field(5.0, gt=0.0, description="Longest check of one answer; then it is no value.")
    memory_mb: int = Field(2048, ge=256, description="Address space a process may use beyond what it starts with.")


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

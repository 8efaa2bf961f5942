"""The base of every configuration section; each section lives beside the thing it configures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen configuration section that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def impossible(self) -> list[str]:
        """Impossible combinations within this section, one message each. They are refused in a run's configuration,
        not in a section that is built alone."""
        return []

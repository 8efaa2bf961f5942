"""The base of every configuration section; each section lives beside the thing it configures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen configuration section that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def impossible(self) -> list[str]:
        """Settings of this section that are fine alone and cannot be trained with together; one sentence each, with
        the way out. A whole run's configuration is refused for them, a section that is built alone is not."""
        return []

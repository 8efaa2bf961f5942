"""What rewards look at."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_pg.types import Sample


@dataclass(frozen=True)
class Response:
    """One response to one question. ``text``: as the model wrote it, without special tokens.

    ``num_tokens``: its length in tokens, end token included; None where nobody counted them.
    """

    sample: Sample
    text: str
    num_tokens: int | None = None

"""Sample rollouts as rows that a tracker can show. What models and data sets wrote is text, never markup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.observe.text import visible

# A tracker's page shows a table as a whole.
MAX_CHARACTERS = 10_000
COLUMNS = ("sample", "question", "answer", "response", "reward", "advantage")


@dataclass(frozen=True)
class Row:
    """One rollout. Texts hold no control characters; ``picture`` is the question's picture strip, if it has one."""

    sample: str
    question: str
    answer: str
    response: str
    reward: float | None
    parts: str
    advantage: float | None
    picture: Path | None

    @property
    def cells(self) -> tuple[str, str, str, str, float | None, float | None]:
        """The values of ``COLUMNS``."""
        return self.sample, self.question, self.answer, self.response, self.reward, self.advantage


def make_row(record: Mapping[str, Any], folder: Path) -> Row:
    """The row of a line of rollouts.jsonl; ``folder`` is the run's."""
    question = "\n".join((record["question"], *record["options"]))
    response = record["response"] + ("" if record["finish_reason"] == "stop" else " [cut off]")
    strip = record.get("thumbnails")
    picture = folder / strip if strip else None
    return Row(
        sample=_shown(record["sample_id"]),
        question=_shown(question),
        answer=_shown(record["answer"]),
        response=_shown(response),
        reward=record["total"],
        parts=_shown(", ".join(f"{name} {json.dumps(value)}" for name, value in record["parts"].items())),
        advantage=record["advantage"],
        picture=picture if picture is not None and picture.is_file() else None,
    )


def pictures(rows: Sequence[Row]) -> dict[Path, str]:
    """Each picture once, with the sample it belongs to."""
    return {row.picture: row.sample for row in rows if row.picture is not None}


def _shown(text: str) -> str:
    text = visible(text)
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"

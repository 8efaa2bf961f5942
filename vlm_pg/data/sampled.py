"""Files of sampled responses, as ``vlm-pg sample`` writes them: one line per training record, in data order.

    {"problem_id": "17", "dataset": "star", "p_correct": 0.5,
     "responses": [{"text": "<think>...</think><answer>B</answer>", "tokens": 212, "finish_reason": "stop",
                    "accuracy": 1.0, "reward": 1.1, "parts": {"accuracy": 1.0, "format": 1.0}}, ...]}

``dataset`` only where ``data.train`` names several sets. ``p_correct``: mean accuracy of the responses that have one;
null without any. ``opened``: what the chat template begins each response with ("<think>\\n"), if anything; it is not in
``text``. ``fault``: reason and message of a question that could not be sampled, which has no responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm_pg.data.sample_sets import named_id
from vlm_pg.errors import ConfigError, printable

SAMPLES = "samples.jsonl"
# Beside it: what the samples depend on, with the configuration.
PROTOCOL = "protocol.json"


class SampledFile:
    """Rows by sample id, with the set's name where there are several ("star/17"). Responses stay on disk.

    Args:
        path: the file, or the folder of ``vlm-pg sample``.

    Raises:
        ConfigError: the file is missing, or a line is no such row or repeats an earlier one's question.
    """

    def __init__(self, path: Path):
        self.path = path / SAMPLES if path.is_dir() else path
        if not self.path.is_file():
            raise ConfigError(
                f"{self.path} is not a file. The {SAMPLES} of a finished vlm-pg sample is expected. Run vlm-pg sample "
                "to its end (the same command goes on where it was), or correct the path."
            )
        self.p_correct: dict[str, float | None] = {}
        self._offsets: dict[str, int] = {}
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = parsed_sample_row(line)
                name = None if row is None else named_id(row["problem_id"], row.get("dataset", ""))
                if row is None or name is None or name in self._offsets:
                    what = "no row of vlm-pg sample" if name is None else f"a second row of '{printable(name, 200)}'"
                    raise ConfigError(
                        f"{self.path}:{number} is {what}. One JSON object per question with problem_id, responses and "
                        "p_correct is expected. Sample again, or correct the line."
                    )
                self._offsets[name], self.p_correct[name] = offset, row["p_correct"]
                offset += len(line)

    def rows(self, sample_ids: Iterator[str]) -> Iterator[Mapping[str, Any] | None]:
        """The row of each question; None where it has none."""
        with self.path.open("rb") as file:
            for sample_id in sample_ids:
                if (offset := self._offsets.get(sample_id)) is None:
                    yield None
                    continue
                file.seek(offset)
                yield json.loads(file.readline())


def parsed_sample_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds; None if it holds none."""
    try:
        row = json.loads(line)
        keys = ("text", "tokens", "finish_reason", "accuracy")
        values = [row["p_correct"], *(response["accuracy"] for response in row["responses"])]
        is_row = isinstance(row["problem_id"], str) and all(isinstance(one, int | float | None) for one in values)
        return row if is_row and all(key in response for response in row["responses"] for key in keys) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None

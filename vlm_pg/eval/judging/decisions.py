"""What a judge decided, on disk: a line an output as replies come, so that a killed evaluation asks only for the rest.

judged_NAME.part.jsonl    while the set NAME is judged
judged_NAME.jsonl         all of a set, in the order of its records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlm_pg.eval.answer_files import file_name
from vlm_pg.eval.contracts import Judged, Output
from vlm_pg.files import json_line, parse_json_line, write_bytes_atomic


@dataclass(frozen=True)
class Place:
    """Of one output: its question, and its number among the question's outputs, from 0."""

    sample_id: str
    output: int


@dataclass(frozen=True)
class AskedOf:
    """Which judge was asked what, and what its reply was scored by: decisions hold for equal ones alone.

    ``message``: digest of the message. ``gold``: kind and text of the answer that is right, which most messages do not
    show.
    """

    url: str
    model: str | None
    message: str
    gold: str


class DecisionFile:
    """The decisions about one set's outputs.

    Args:
        folder: of the evaluation.
        name: of the set.
    """

    def __init__(self, folder: Path, name: str):
        self.path = folder / f"judged_{file_name(name)}.jsonl"
        self._part = self.path.with_suffix(".part.jsonl")

    def kept(self) -> dict[tuple[Place, AskedOf], Judged]:
        """Usable decisions that an evaluation has left; a line that was cut off is none."""
        found: dict[tuple[Place, AskedOf], Judged] = {}
        for path in (self.path, self._part):
            for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
                row = parse_json_line(line)
                try:
                    place = Place(row["sample_id"], row["output"])  # type: ignore[index]
                    judged = Judged(**row["judged"])  # type: ignore[index]
                    asked = AskedOf(**row["asked"])  # type: ignore[index]
                except (KeyError, TypeError):
                    continue
                if judged.decided:
                    found[place, asked] = judged
        return found

    def append(self, place: Place, output: Output, asked: AskedOf, judged: Judged) -> None:
        """Add one, at once."""
        with self._part.open("ab") as file:
            # What a kill cut off becomes a line that is no row.
            file.write(b"\n" * bool(file.tell()) + _line(place, output, asked, judged))

    def complete(self, rows: Sequence[tuple[Place, Output, AskedOf, Judged]]) -> None:
        """Write all rows of the set in one piece."""
        write_bytes_atomic(self.path, b"".join(_line(*row) for row in rows))
        self._part.unlink(missing_ok=True)


def _line(place: Place, output: Output, asked: AskedOf, judged: Judged) -> bytes:
    rules: Mapping[str, Any] = {"answer": output.reading.answer, "score": output.reading.score}
    row = {**asdict(place), "rules": rules, "judged": asdict(judged), "asked": asdict(asked), "text": output.text}
    return json_line(row)

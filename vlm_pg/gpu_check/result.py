"""The check's result: a JSON file, written after every stage."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlm_pg.errors import ConfigError
from vlm_pg.files import write_json_atomic

FORMAT = 1
RESULT, PAGE = "result.json", "report.html"

Status = Literal["ok", "failed", "time was up", "left out"]


@dataclass
class Outcome:
    """What became of a stage.

    ``code``: of the last command, None where it was ended or none began. ``problem``: why it is not ok, in words.
    ``remarks``: what is to be known of a stage that is. ``end_of_log``: its last lines, unless it is ok.
    """

    name: str
    title: str
    status: Status
    code: int | None = None
    seconds: float = 0.0
    limit_seconds: float = 0.0
    problem: str = ""
    remarks: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    log: str | None = None
    end_of_log: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class Result:
    """What is known so far. ``head``: of the run as a whole."""

    def __init__(self, folder: Path, head: dict[str, Any], outcomes: list[Outcome]):
        self.folder, self.head, self.outcomes = folder, head, outcomes

    @classmethod
    def open(cls, folder: Path, head: dict[str, Any], resume: bool) -> Result:
        """An empty result, or with ``resume`` what became of the stages that have run.

        Raises:
            ConfigError: the folder holds something and is not to be gone on with, or its result cannot be read.
        """
        path = folder / RESULT
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty. Add --resume to run what it lacks, or give another --out.")
        folder.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, **head}
        if not path.is_file():
            return cls(folder, head, [])
        try:
            earlier = json.loads(path.read_bytes())
            if earlier["format"] != FORMAT:
                raise ConfigError(f"{path} has format {earlier['format']!r}, not {FORMAT}. Give another --out.")
            outcomes = [Outcome(**entry) for entry in earlier["stages"]]
            commands = list(earlier["commands"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} cannot be read ({error!r}). Give another folder with --out.") from error
        head["commands"] = [*commands, *head["commands"]]
        return cls(folder, head, outcomes)

    def is_ok(self, name: str) -> bool:
        """Whether the stage of that name has gone well already."""
        return any(outcome.name == name and outcome.status == "ok" for outcome in self.outcomes)

    def named(self, name: str) -> Outcome:
        """What became of a stage that has run."""
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    def add(self, outcome: Outcome) -> None:
        """In the place of an earlier one of that name; written at once."""
        self.outcomes = [other for other in self.outcomes if other.name != outcome.name] + [outcome]
        self.save()

    def as_json(self) -> dict[str, Any]:
        return {**self.head, "stages": [asdict(outcome) for outcome in self.outcomes]}

    def save(self) -> None:
        """Numbers that are not finite are written as text: JSON has none."""
        write_json_atomic(self.folder / RESULT, _finite(self.as_json()))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not (-float("inf") < value < float("inf")):
        return str(value)
    return value

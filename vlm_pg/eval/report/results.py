"""Reading a results folder for the report: figures, protocol and answers, or why they are missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vlm_pg.errors import ConfigError
from vlm_pg.eval.answer_files import file_name, parsed_row
from vlm_pg.eval.contracts import Answered
from vlm_pg.observe.report.markup import dict_at
from vlm_pg.observe.text import visible

_PART = re.compile(r"\.part-\d{1,9}\.jsonl")
_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)
_MAX_LABEL = 200


@dataclass
class Results:
    """One results folder.

    Args:
        answers: the file of each set.
        missing: why result.json has no figures, "" where it has.
        damaged: per file, lines that are no questions.
    """

    folder: Path
    name: str
    sets: dict[str, dict[str, Any]]
    protocol: dict[str, Any]
    answers: dict[str, Path]
    missing: str = ""
    damaged: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The training step of the checkpoint (``.../step-000120``); None where the protocol names no such one."""
        match = _STEP.fullmatch(Path(str(self.protocol.get("checkpoint", ""))).name)
        return int(match[1]) if match else None

    def rows(self, name: str) -> Iterator[tuple[Answered, dict[str, Any]]]:
        """The questions of a set in the order of its file, each with the frames that were shown (``shown``)."""
        path, damaged = self.answers[name], 0
        with path.open("rb") as file:
            for line in file:
                row = parsed_row(line)
                if row is None:
                    damaged += bool(line.strip())
                else:
                    yield Answered.from_row(row), dict_at(row, "shown")
        if damaged:
            self.damaged[path.name] = damaged


class Mark(NamedTuple):
    """A question's score for comparisons (mean@n, None without a value) and its cluster."""

    score: float | None
    cluster: str


Marks = dict[str, dict[str, Mark]]


def read_results(folder: Path) -> Results:
    """Read a results folder's figures and protocol; answers are read on demand.

    Raises:
        ConfigError: it holds neither result.json nor answers.
    """
    figures, missing = _read_figures(folder / "result.json")
    sets = {str(name): entry for name, entry in dict_at(figures, "sets").items() if isinstance(entry, dict)}
    files = sorted(path for path in folder.glob("answers_*.jsonl") if not _PART.search(path.name))
    if missing and not files:
        raise ConfigError(
            f"'{folder}' is no folder of results: {missing} It holds result.json and answers_<set>.jsonl. Give the "
            "folder that an evaluation wrote, e.g. runs/mine/eval-step-000100."
        )
    by_file = {file_name(name): name for name in sets}
    stems = {path: path.stem.removeprefix("answers_") for path in files}
    answers = {by_file.get(stem, stem): path for path, stem in stems.items()}
    # In the order of result.json, which is that of the configuration.
    answers = {name: answers[name] for name in sorted(answers, key=lambda name: [*sets, name].index(name))}
    return Results(folder, folder.resolve().name, sets, dict_at(figures, "protocol"), answers, missing)


def _read_figures(path: Path) -> tuple[dict[str, Any], str]:
    try:
        figures = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, "result.json is not there: no evaluation has been completed."
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"result.json cannot be read: {error}."
    if not isinstance(figures, dict):
        return {}, "result.json holds no figures: it is not a JSON object."
    return figures, ""


def read_marks(results: Results) -> Marks:
    """Score and cluster of every question, by set and sample id."""
    return {
        name: {answered.sample_id: Mark(answered.score, answered.cluster) for answered, _ in results.rows(name)}
        for name in results.answers
    }


def label(name: object) -> str:
    """A name of a set, category or run without control characters, and not too long."""
    return visible(str(name))[:_MAX_LABEL]

"""Choosing sample rollouts from a rollouts.jsonl of any size: one pass that keeps places, not texts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.read import is_step

# Of one group; a page that shows more does not open.
MAX_ROLLOUTS = 128


@dataclass
class Sightings:
    """When a question was logged first and last, and where those groups begin in the file (bytes)."""

    sample_id: str
    category: str
    first_step: int
    first_offset: int
    last_step: int
    last_offset: int


@dataclass(frozen=True)
class Encounter:
    """The rollouts of one question at one step, in order."""

    step: int
    rollouts: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Question:
    """One question as the report shows it: its first encounter and, if it came again, its last."""

    encounters: tuple[Encounter, ...]

    @property
    def record(self) -> dict[str, Any]:
        """A record that has the question's text, options, answer and picture strip."""
        return self.encounters[0].rollouts[0]


def choose_questions(path: Path, count: int) -> list[Question]:
    """Up to ``count`` questions, never chosen by how they were answered.

    Questions seen at two or more steps come first, those with most steps in between ahead, taking turns between
    categories. If there are too few, the earliest and the latest questions seen once fill up.
    """
    sightings = index_rollouts(path)
    again = sorted(
        (sighting for sighting in sightings if sighting.last_step > sighting.first_step),
        key=lambda sighting: sighting.first_step - sighting.last_step,
    )
    chosen = _take_turns(again, count)
    if len(chosen) < count:
        once = [sighting for sighting in sightings if sighting.last_step == sighting.first_step]
        needed = count - len(chosen)
        early, late = once[: (needed + 1) // 2], once[(needed + 1) // 2 :]
        chosen += early + late[max(0, len(late) - needed // 2) :]
    return [_load(path, sighting) for sighting in chosen]


def index_rollouts(path: Path) -> list[Sightings]:
    """First and last sighting of every question that training logged, in order of the first."""
    found: dict[str, Sightings] = {}
    offset = 0
    with path.open("rb") as file:
        for line in file:
            start, offset = offset, offset + len(line)
            record = parse_json_line(line)
            if record is None or record.get("phase", "train") != "train" or not is_step(record.get("step")):
                continue
            sample_id, step = str(record.get("sample_id")), record["step"]
            sighting = found.get(sample_id)
            if sighting is None:
                category = str(record.get("category", ""))
                found[sample_id] = Sightings(sample_id, category, step, start, step, start)
            elif step > sighting.last_step:
                sighting.last_step, sighting.last_offset = step, start
    return list(found.values())


def _take_turns(sightings: list[Sightings], count: int) -> list[Sightings]:
    queues: dict[str, deque[Sightings]] = {}
    for sighting in sightings:
        queues.setdefault(sighting.category, deque()).append(sighting)
    chosen: list[Sightings] = []
    while queues and len(chosen) < count:
        for category in list(queues):
            chosen.append(queues[category].popleft())
            if not queues[category]:
                del queues[category]
    return chosen[:count]


def _load(path: Path, sighting: Sightings) -> Question:
    places = {sighting.first_step: sighting.first_offset, sighting.last_step: sighting.last_offset}
    return Question(tuple(_read_group(path, sighting.sample_id, step, offset) for step, offset in places.items()))


def _read_group(path: Path, sample_id: str, step: int, offset: int) -> Encounter:
    """The lines from ``offset`` on that belong to the same question and step, one group of them."""
    rollouts: list[dict[str, Any]] = []
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            record = parse_json_line(line)
            if record is None or str(record.get("sample_id")) != sample_id or record.get("step") != step:
                break
            if rollouts and record.get("rollout") == rollouts[0].get("rollout"):
                break  # the same question came twice in one step: this is its second group
            rollouts.append(record)
            if len(rollouts) == MAX_ROLLOUTS:
                break
    return Encounter(step, tuple(rollouts))

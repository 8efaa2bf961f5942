"""Sample rollouts beside their frames. All text here comes from data or a model and is escaped."""

from __future__ import annotations

import base64
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.markup import dict_at, first, first_entries, number, number_or_none, shown
from vlm_pg.observe.report.read import RunData, is_step

NUM_QUESTIONS = 6
_MAX_RESPONSE_CHARACTERS = 6000
_MAX_OPTIONS, _MAX_PARTS = 50, 40
_MAX_STRIP_BYTES = 1_000_000
_TAG = re.compile(r"(</?(?:think|answer)>)")


def rollouts_view(run: RunData) -> dict[str, Any]:
    """Cards of questions, each with its frames and its rollouts early and late in training."""
    reason, questions = run.missing.get("rollouts.jsonl", ""), list[Question]()
    if not reason:
        try:
            questions = choose_questions(run.folder.rollouts, NUM_QUESTIONS)
            reason = "" if questions else "rollouts.jsonl is empty: no rollouts have been logged."
        except OSError as error:
            reason = f"rollouts.jsonl cannot be read: {error}"
    top = max((abs(total) for question in questions for total in _totals(question)), default=1.0) or 1.0
    lead = (
        "The same question early and late in training where it came up again; chosen by step and category, "
        "not by how it was answered."
    )
    cards = [_card(run.folder.path, question, top) for question in questions]
    return {"none": reason, "lead": "" if reason else lead, "cards": cards}


def _card(run_path: Path, question: Question, top: float) -> dict[str, Any]:
    """One question; ``top`` is the largest reward on the page, which fills a square of the group's rewards."""
    record = question.record
    answer, options = record.get("answer", ""), record.get("options")
    answer = answer if isinstance(answer, str) else shown(answer)
    listed, more = first(options if isinstance(options, list) else [], _MAX_OPTIONS)
    picture, no_picture = _strip(run_path, record.get("thumbnails"))
    return {
        "picture": picture,
        "no_picture": no_picture,
        "question": record.get("question", ""),
        "options": [(option, isinstance(option, str) and option.startswith(answer + ".")) for option in listed],
        "more_options": more,
        "answer": answer,
        "category": record.get("category", ""),
        "sample_id": record.get("sample_id", ""),
        "sides": [_side(encounter, top) for encounter in question.encounters],
    }


def _totals(question: Question) -> list[float]:
    records = [record for encounter in question.encounters for record in encounter.rollouts]
    totals = [number_or_none(record.get("total")) for record in records]
    return [total for total in totals if total is not None]


def _strip(run_path: Path, name: object) -> tuple[Markup | None, str | None]:
    """The picture strip in base64, or why there is none; only the run's own thumbnails folder is read."""
    if not isinstance(name, str):
        return None, None
    folder = (run_path / "thumbnails").resolve()
    try:
        path = (run_path / name).resolve()
        if folder not in path.parents:
            return None, f"The picture {name} lies outside the run's folder and is not shown."
        if not path.is_file():
            return None, f"The picture {name} is not there any more."
        if path.stat().st_size > _MAX_STRIP_BYTES:
            return None, f"The picture {name} is larger than {_MAX_STRIP_BYTES:,} bytes and is not shown."
        return Markup(base64.b64encode(path.read_bytes()).decode("ascii")), None
    except (OSError, ValueError, RuntimeError) as error:  # a name that is none, links in a circle
        return None, f"The picture {name} cannot be read: {error}"


def _side(encounter: Encounter, top: float) -> dict[str, Any]:
    totals = [number_or_none(record.get("total")) for record in encounter.rollouts]
    valued = [total for total in totals if total is not None]
    shown_first = _best_and_worst(totals)
    rest = [index for index in range(len(totals)) if index not in shown_first]
    return {
        "step": encounter.step,
        "dots": [(format(100 * min(max((total or 0.0) / top, 0.0), 1.0), ".0f"), total) for total in totals],
        "mean": f"mean reward {sum(valued) / len(valued):.2f}" if valued else "no reward value",
        "shown": [_response(encounter.rollouts[index]) for index in shown_first],
        "rest": [_response(encounter.rollouts[index]) for index in rest],
    }


def _best_and_worst(totals: list[float | None]) -> list[int]:
    """Highest and lowest reward of the group (the first of equals); the first two rollouts when all are equal."""
    valued = [index for index, total in enumerate(totals) if total is not None]
    if not valued:
        return list(range(min(2, len(totals))))
    best = max(valued, key=lambda index: totals[index] or 0.0)
    worst = min(valued, key=lambda index: totals[index] or 0.0)
    return [best, worst] if totals[best] != totals[worst] else valued[:2]


def _response(record: dict[str, Any]) -> dict[str, Any]:
    advantage = number_or_none(record.get("advantage"))
    sign = "" if not advantage else "up" if advantage > 0 else "down"
    said = "" if advantage is None else format(advantage, "+.2f") if sign else "0"
    notes, text = dict_at(record, "notes"), record.get("response", "")
    return {
        "text": highlight(text if isinstance(text, str) else shown(text)),
        "parts": [
            {
                "name": name,
                "value": "no value" if number_or_none(value) is None else number(number_or_none(value)),
                "note": notes.get(name),
            }
            for name, value in first_entries(dict_at(record, "parts"), _MAX_PARTS)
        ],
        "advantage": said.replace("-", "−"),
        "sign": sign,
        "cut_off": record.get("finish_reason") == "length",
        "tokens": number(number_or_none(record.get("response_tokens"))),
    }


def highlight(text: str) -> Markup:
    """A response as HTML: escaped, with think and answer blocks marked; long ones are cut, and say so.

    highlight("<answer>A</answer>") ==
        '<span class="tag">&lt;answer&gt;</span><span class="answer">A</span><span class="tag">&lt;/answer&gt;</span>'
    """
    span = Markup('<span class="{}">{}</span>')
    pieces, inside = Markup(), ""
    for piece in _TAG.split(text[:_MAX_RESPONSE_CHARACTERS]):
        if _TAG.fullmatch(piece):
            pieces += span.format("tag", piece)
            inside = "" if piece.startswith("</") else piece.strip("<>")
        elif piece:
            words = shown(piece, _MAX_RESPONSE_CHARACTERS)
            pieces += span.format(inside, words) if inside else words
    cut = len(text) - _MAX_RESPONSE_CHARACTERS
    return pieces + span.format("tag", f" … {cut:,} more characters in rollouts.jsonl") if cut > 0 else pieces


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

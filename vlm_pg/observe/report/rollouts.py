"""Sample rollouts beside their frames. All text here comes from data or a model and is escaped."""

from __future__ import annotations

import base64
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.markup import dict_at, number, number_or_none, shown
from vlm_pg.observe.report.read import RunData, is_step

NUM_QUESTIONS = 6
# Of one group; a page that shows more does not open.
MAX_ROLLOUTS = 128
_MAX_RESPONSE_CHARACTERS = 6000
_MAX_STRIP_BYTES = 1_000_000
_TAG = re.compile(r"(</?(?:think|answer)>)")


@dataclass
class LoggedQuestion:
    """The first and the last step that logged a question, and the offsets of those groups in the file (bytes)."""

    sample_id: str
    category: str
    first_step: int
    first_offset: int
    last_step: int
    last_offset: int


class GroupAtStep(NamedTuple):
    """The rollouts of one question at one step, in order."""

    step: int
    rollouts: list[dict[str, Any]]


def choose_questions(path: Path, count: int) -> list[list[GroupAtStep]]:
    """The first group, and the last if it was sampled again, of up to ``count`` questions of a file of any size.

    How questions were answered never decides. Those logged at two or more steps come first, those with most steps in
    between ahead, taking turns between categories. If there are too few, the earliest and the latest questions logged
    once fill up.
    """
    logged = _index(path)
    repeated = sorted(
        (question for question in logged if question.last_step > question.first_step),
        key=lambda question: question.first_step - question.last_step,
    )
    queues: dict[str, deque[LoggedQuestion]] = {}
    for question in repeated:
        queues.setdefault(question.category, deque()).append(question)
    chosen: list[LoggedQuestion] = []
    while len(chosen) < min(count, len(repeated)):
        chosen += [queue.popleft() for queue in queues.values() if queue]
    chosen = chosen[:count]
    once = [question for question in logged if question.last_step == question.first_step]
    needed = count - len(chosen)
    early, late = once[: (needed + 1) // 2], once[(needed + 1) // 2 :]
    chosen += early + late[max(0, len(late) - needed // 2) :]
    return [_load(path, question) for question in chosen]


def _index(path: Path) -> list[LoggedQuestion]:
    """Every question that training logged, in order of the first step: one pass, no texts."""
    found: dict[str, LoggedQuestion] = {}
    offset = 0
    with path.open("rb") as file:
        for line in file:
            start, offset = offset, offset + len(line)
            record = parse_json_line(line)
            if record is None or record.get("phase", "train") != "train" or not is_step(record.get("step")):
                continue
            sample_id, step = str(record.get("sample_id")), record["step"]
            question = found.get(sample_id)
            if question is None:
                category = str(record.get("category", ""))
                found[sample_id] = LoggedQuestion(sample_id, category, step, start, step, start)
            elif step > question.last_step:
                question.last_step, question.last_offset = step, start
    return list(found.values())


def _load(path: Path, question: LoggedQuestion) -> list[GroupAtStep]:
    offsets = {question.first_step: question.first_offset, question.last_step: question.last_offset}
    groups = []
    with path.open("rb") as file:
        for step, offset in offsets.items():
            rollouts: list[dict[str, Any]] = []
            file.seek(offset)
            for line in file:
                record = parse_json_line(line)
                if record is None or str(record.get("sample_id")) != question.sample_id or record.get("step") != step:
                    break
                if rollouts and record.get("rollout") == rollouts[0].get("rollout"):
                    break  # a second group of the question in this step
                rollouts.append(record)
                if len(rollouts) == MAX_ROLLOUTS:
                    break
            groups.append(GroupAtStep(step, rollouts))
    return groups


def rollouts_view(run: RunData) -> dict[str, Any]:
    """Cards of questions, each with its frames and its rollouts early and late in training."""
    reason, questions = run.missing.get("rollouts.jsonl", ""), list[list[GroupAtStep]]()
    if not reason:
        try:
            questions = choose_questions(run.folder.rollouts, NUM_QUESTIONS)
            reason = "" if questions else "rollouts.jsonl is empty: no rollouts have been logged."
        except OSError as error:
            reason = f"rollouts.jsonl cannot be read: {error}"
    records = [record for groups in questions for group in groups for record in group.rollouts]
    top = max((abs(number_or_none(record.get("total")) or 0.0) for record in records), default=1.0) or 1.0
    lead = (
        "The same question early and late in training where it came up again; chosen by step and category, "
        "not by how it was answered."
    )
    cards = [_card(run.folder.path, groups, top) for groups in questions]
    return {"none": reason, "lead": "" if reason else lead, "cards": cards}


def _card(run_path: Path, groups: list[GroupAtStep], top: float) -> dict[str, Any]:
    """One question; ``top`` is the largest reward on the page, which fills a square of the group's rewards."""
    record = groups[0].rollouts[0]
    answer, options = record.get("answer", ""), record.get("options")
    answer = answer if isinstance(answer, str) else shown(answer)
    options = options if isinstance(options, list) else []
    picture, no_picture = _strip(run_path, record.get("thumbnails"))
    return {
        "picture": picture,
        "no_picture": no_picture,
        "question": record.get("question", ""),
        "options": [(option, isinstance(option, str) and option.startswith(answer + ".")) for option in options],
        "answer": answer,
        "category": record.get("category", ""),
        "sample_id": record.get("sample_id", ""),
        "sides": [_side(group, top) for group in groups],
    }


def _strip(run_path: Path, name: object) -> tuple[Markup | None, str | None]:
    """The picture strip in base64, or why there is none."""
    if not isinstance(name, str):
        return None, None
    try:
        return Markup(base64.b64encode(read_picture(run_path, name)).decode("ascii")), None
    except (OSError, ValueError, RuntimeError) as error:
        return None, f"The frames cannot be shown: {error}."


def read_picture(folder: Path, name: str) -> bytes:
    """A picture by its path in a run's or a results folder; nothing outside of the folder is read.

    Raises:
        OSError, ValueError, RuntimeError: there is no such picture, it is too large, or it cannot be read.
    """
    path = (folder / name).resolve()
    if folder.resolve() not in path.parents:
        raise ValueError(f"the picture {name} lies outside the folder {folder.name}")
    if not path.is_file():
        raise ValueError(f"the picture {name} is not there")
    if path.stat().st_size > _MAX_STRIP_BYTES:
        raise ValueError(f"the picture {name} is larger than {_MAX_STRIP_BYTES:,} bytes")
    return path.read_bytes()


def _side(group: GroupAtStep, top: float) -> dict[str, Any]:
    """One group: its rewards, and its rollouts with the best and the worst (the first of equals) ahead."""
    totals = [number_or_none(record.get("total")) for record in group.rollouts]
    valued = [(index, total) for index, total in enumerate(totals) if total is not None]
    ahead = list(range(min(2, len(totals))))
    if valued:
        best, worst = max(valued, key=lambda item: item[1]), min(valued, key=lambda item: item[1])
        ahead = [best[0], worst[0]] if best[1] != worst[1] else [index for index, _ in valued[:2]]
    rest = [index for index in range(len(totals)) if index not in ahead]
    return {
        "step": group.step,
        "dots": [(format(100 * min(max((total or 0.0) / top, 0.0), 1.0), ".0f"), total) for total in totals],
        "mean": f"mean reward {sum(t for _, t in valued) / len(valued):.2f}" if valued else "no reward value",
        "shown": [_response(group.rollouts[index]) for index in ahead],
        "rest": [_response(group.rollouts[index]) for index in rest],
    }


def _response(record: dict[str, Any]) -> dict[str, Any]:
    advantage = number_or_none(record.get("advantage"))
    sign = "" if not advantage else "up" if advantage > 0 else "down"
    words = "" if advantage is None else format(advantage, "+.2f") if sign else "0"
    notes, text = dict_at(record, "notes"), record.get("response", "")
    return {
        "text": highlight(text if isinstance(text, str) else shown(text)),
        "parts": [
            {
                "name": name,
                "value": "no value" if number_or_none(value) is None else number(number_or_none(value)),
                "note": notes.get(name),
            }
            for name, value in dict_at(record, "parts").items()
        ],
        "advantage": words.replace("-", "−"),
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

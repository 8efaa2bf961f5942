"""Sample rollouts beside the frames they are about. All text here comes from data or a model and is escaped."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from vlm_pg.observe.report.markup import absent, dict_at, esc, first, first_entries, number, number_or_none, section
from vlm_pg.observe.report.read import RunData
from vlm_pg.observe.report.rollout_index import Encounter, Question, choose_questions

NUM_QUESTIONS = 6
_MAX_RESPONSE_CHARACTERS = 6000
_MAX_OPTIONS, _MAX_PARTS = 50, 40
_MAX_STRIP_BYTES = 1_000_000
_TAG = re.compile(r"(</?(?:think|answer)>)")


def rollouts_section(run: RunData) -> str:
    """Cards of questions, each with its frames and its rollouts early and late in training."""
    title = "Sample rollouts"
    if "rollouts.jsonl" in run.missing:
        return section("rollouts", title, absent(run.missing["rollouts.jsonl"]))
    try:
        questions = choose_questions(run.folder.rollouts, NUM_QUESTIONS)
    except OSError as error:
        return section("rollouts", title, absent(f"rollouts.jsonl cannot be read: {error}"))
    if not questions:
        return section("rollouts", title, absent("rollouts.jsonl is empty: no rollouts have been logged."))
    top = max((abs(total) for question in questions for total in _totals(question)), default=1.0) or 1.0
    cards = "".join(_card(run.folder.path, question, top) for question in questions)
    lead = (
        "The same question early and late in training where it came up again; chosen by step and category, "
        "not by how it was answered."
    )
    return section("rollouts", title, cards, lead)


def _card(run_path: Path, question: Question, top: float) -> str:
    """One question; ``top`` is the largest reward on the page, which fills a square of the group's rewards."""
    record = question.record
    options = record.get("options")
    answer = record.get("answer", "")
    answer = answer if isinstance(answer, str) else esc(answer)
    listed, more = first(options if isinstance(options, list) else [], _MAX_OPTIONS)
    is_gold = [isinstance(option, str) and option.startswith(answer + ".") for option in listed]
    items = "".join(
        f'<li class="{"gold" if gold else ""}">{esc(option)}</li>' for option, gold in zip(listed, is_gold, strict=True)
    )
    items += f"<li>… {more:,} more options in rollouts.jsonl</li>" if more else ""
    sides = "".join(_encounter(encounter, top) for encounter in question.encounters)
    return (
        f'<article class="card rollout-card">{_strip(run_path, record)}'
        f'<div class="question"><p>{esc(record.get("question", ""))}</p>'
        f'<ul class="options">{items}</ul>'
        f'<p class="meta">gold answer <b>{esc(answer)}</b> · {esc(record.get("category", ""))} · '
        f"sample <code>{esc(record.get('sample_id', ''))}</code></p></div>"
        f'<div class="sides n{len(question.encounters)}">{sides}</div></article>'
    )


def _totals(question: Question) -> list[float]:
    records = [record for encounter in question.encounters for record in encounter.rollouts]
    totals = [number_or_none(record.get("total")) for record in records]
    return [total for total in totals if total is not None]


def _strip(run_path: Path, record: dict[str, Any]) -> str:
    """The picture strip as a data URI; only files inside the run's own thumbnails folder are read."""
    name = record.get("thumbnails")
    if not isinstance(name, str):
        return ""
    folder = (run_path / "thumbnails").resolve()
    try:
        path = (run_path / name).resolve()
        if folder not in path.parents:
            return absent(f"The picture {name} lies outside the run's folder and is not shown.")
        if not path.is_file():
            return absent(f"The picture {name} is not there any more.")
        if path.stat().st_size > _MAX_STRIP_BYTES:
            return absent(f"The picture {name} is larger than {_MAX_STRIP_BYTES:,} bytes and is not shown.")
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except (OSError, ValueError, RuntimeError) as error:  # a name that is none, links in a circle
        return absent(f"The picture {name} cannot be read: {error}")
    return (
        f'<div class="strip"><img src="data:image/jpeg;base64,{data}" alt="frames that the model saw, in order"></div>'
    )


def _encounter(encounter: Encounter, top: float) -> str:
    totals = [number_or_none(record.get("total")) for record in encounter.rollouts]
    valued = [total for total in totals if total is not None]
    mean = f"mean reward {sum(valued) / len(valued):.2f}" if valued else "no reward value"
    dots = "".join(_dot(total, top) for total in totals)
    shown = _best_and_worst(encounter)
    rest = [index for index in range(len(encounter.rollouts)) if index not in shown]
    body = "".join(_response(encounter.rollouts[index]) for index in shown)
    if rest:
        others = "".join(_response(encounter.rollouts[index]) for index in rest)
        body += f"<details><summary>{len(rest)} more of this group</summary>{others}</details>"
    return (
        f'<div class="side"><h4>step {encounter.step:,} <span class="dots">{dots}</span>'
        f"<small>{mean}</small></h4>{body}</div>"
    )


def _dot(total: float | None, top: float) -> str:
    if total is None:
        return '<i class="none" title="no value"></i>'
    share = min(max(total / top, 0.0), 1.0)
    return f'<i style="--fill:{100 * share:.0f}%" title="reward {total:.2f}"></i>'


def _best_and_worst(encounter: Encounter) -> list[int]:
    """Highest and lowest reward of the group (the first of equals); the first two rollouts when all are equal."""
    totals = [number_or_none(record.get("total")) for record in encounter.rollouts]
    valued = [index for index, total in enumerate(totals) if total is not None]
    if not valued:
        return list(range(min(2, len(totals))))
    best = max(valued, key=lambda index: totals[index] or 0.0)
    worst = min(valued, key=lambda index: totals[index] or 0.0)
    return [best, worst] if totals[best] != totals[worst] else valued[:2]


def _response(record: dict[str, Any]) -> str:
    advantage = number_or_none(record.get("advantage"))
    sign = "" if not advantage else "up" if advantage > 0 else "down"
    advantage_html = (
        ""
        if advantage is None
        else f'<span class="chip {sign}">advantage {format(advantage, "+.2f") if sign else 0}</span>'.replace("-", "−")
    )
    notes = dict_at(record, "notes")
    chips = "".join(
        _part_chip(name, value, notes) for name, value in first_entries(dict_at(record, "parts"), _MAX_PARTS)
    )
    cut = '<span class="chip down">cut off</span>' if record.get("finish_reason") == "length" else ""
    tokens = f'<span class="chip quiet">{number(number_or_none(record.get("response_tokens")))} tok</span>'
    response = record.get("response", "")
    text = highlight(response if isinstance(response, str) else esc(response))
    return f'<div class="response"><pre>{text}</pre><div class="chips">{chips}{advantage_html}{cut}{tokens}</div></div>'


def _part_chip(name: object, value: object, notes: dict[str, Any]) -> str:
    shown = number_or_none(value)
    title = f' title="{esc(notes[name])}"' if name in notes else ""
    text = "no value" if shown is None else number(shown)
    return f'<span class="chip"{title}>{esc(name)} {text}</span>'


def highlight(text: str) -> str:
    """A response as HTML: escaped, with think and answer blocks marked; long ones are cut, and say so.

    highlight("<answer>A</answer>") ==
        '<span class="tag">&lt;answer&gt;</span><span class="answer">A</span><span class="tag">&lt;/answer&gt;</span>'
    """
    cut = len(text) - _MAX_RESPONSE_CHARACTERS
    pieces = []
    inside = ""
    for piece in _TAG.split(text[:_MAX_RESPONSE_CHARACTERS]):
        if _TAG.fullmatch(piece):
            pieces.append(f'<span class="tag">{esc(piece)}</span>')
            inside = "" if piece.startswith("</") else piece.strip("<>")
        elif piece:
            words = esc(piece, _MAX_RESPONSE_CHARACTERS)
            pieces.append(f'<span class="{inside}">{words}</span>' if inside else words)
    if cut > 0:
        pieces.append(f'<span class="tag"> … {cut:,} more characters in rollouts.jsonl</span>')
    return "".join(pieces)

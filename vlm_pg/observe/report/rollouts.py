"""Sample rollouts beside the frames they are about. All text here comes from data or a model and is escaped."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg.observe.report.markup import dict_at, first, first_entries, number, number_or_none, shown
from vlm_pg.observe.report.read import RunData
from vlm_pg.observe.report.rollout_index import Encounter, Question, choose_questions

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

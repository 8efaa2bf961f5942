"""A question and its outputs as the page carries them: text made visible and cut, an outcome, flags to filter by."""

from __future__ import annotations

import json
from typing import Any

from vlm_pg.eval.contracts import Answered, Judged, Output
from vlm_pg.eval.report.results import label, score_of
from vlm_pg.observe.report.markup import first, number_or_none
from vlm_pg.observe.text import one_line, visible
from vlm_pg.types import right_letters

# Outcomes of a question, by its score (mean@n).
WRONG, PARTLY, RIGHT, NO_VALUE = range(4)
# What else one looks for; a question has the sum of those it meets.
UNPARSED, DISAGREEING, TRUNCATED, BAD_MEDIA, OTHERS_DIFFER, JUDGED = 1, 2, 4, 8, 16, 32

_MAX_OPTIONS, _MAX_OUTPUTS, _MAX_DETAILS, _MAX_MARKS = 50, 64, 40, 32
_OPTION_CHARACTERS, _SHORT_CHARACTERS, _PREVIEW_CHARACTERS = 500, 300, 130


def outcome_of(answered: Answered) -> int:
    """RIGHT: every output that counts scores 1; WRONG: every one scores 0; PARTLY: anything between."""
    score = score_of(answered)
    if score is None:
        return NO_VALUE
    return RIGHT if score >= 1 else WRONG if score <= 0 else PARTLY


def flags_of(answered: Answered) -> int:
    """UNPARSED: some output gives no answer. DISAGREEING: not all of them give the same. TRUNCATED: some was cut off.
    BAD_MEDIA: the question could not be asked. JUDGED: a judge model decided about some.
    """
    answers = {str(one.reading.answer) if one.reading.answer is not None else None for one in answered.outputs}
    return (
        UNPARSED * (None in answers)
        + DISAGREEING * (len(answers) > 1)
        + TRUNCATED * any(one.finish_reason == "length" for one in answered.outputs)
        + BAD_MEDIA * (answered.fault is not None)
        + JUDGED * any(one.judged is not None and one.judged.decided for one in answered.outputs)
    )


def marks_of(answered: Answered) -> str:
    """A character an output, for the row of squares: its score in tenths ("0" to "9", "A" for 1), "-" without one."""
    scores = [number_or_none(one.reading.score) if one.reading.counts else None for one in answered.outputs]
    tenths = ["-" if score is None else "0123456789A"[int(10 * min(max(score, 0.0), 1.0))] for score in scores]
    return "".join(tenths[:_MAX_MARKS]) + ("+" if len(tenths) > _MAX_MARKS else "")


def preview_of(answered: Answered) -> str:
    """The beginning of a question on one line."""
    flat = one_line(str(answered.question)[: 4 * _PREVIEW_CHARACTERS])
    return flat if len(flat) <= _PREVIEW_CHARACTERS else flat[: _PREVIEW_CHARACTERS - 1] + "…"


def detail_of(answered: Answered, limit: int) -> dict[str, Any]:
    """All that is shown of a question; texts longer than ``limit`` characters lose their middle, and say how much."""
    options, more_options = first(answered.options, _MAX_OPTIONS)
    outputs, more_outputs = first(answered.outputs, _MAX_OUTPUTS)
    details = answered.details if isinstance(answered.details, dict) else {}
    return {
        "question": pieces(answered.question, limit),
        "options": [_short(option, _OPTION_CHARACTERS) for option in options],
        "more_options": more_options,
        "gold": _short(answered.gold, _OPTION_CHARACTERS),
        "gold_at": _gold_options(answered, options),
        "kind": label(answered.kind),
        "cluster": _short(answered.cluster),
        "details": [
            [label(name), _short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]
            for name, value in list(details.items())[:_MAX_DETAILS]
        ],
        "fault": None if answered.fault is None else [label(answered.fault[0]), _short(answered.fault[1], 2000)],
        "outputs": [_output(one, limit) for one in outputs],
        "more_outputs": more_outputs,
    }


def _output(one: Output, limit: int) -> dict[str, Any]:
    reading = one.reading
    return {
        "text": pieces(one.text, limit),
        "answer": None if reading.answer is None else _short(reading.answer),
        "score": number_or_none(reading.score),
        "note": _short(reading.note),
        "counts": reading.counts is not False,
        "cut_off": one.finish_reason == "length",
        "tokens": number_or_none(one.num_tokens),
        "judged": None if one.judged is None else _judged(one.judged, limit),
    }


def _judged(judged: Judged, limit: int) -> dict[str, Any]:
    return {
        "decided": judged.decided is True,
        "answer": None if judged.answer is None else _short(judged.answer),
        "score": number_or_none(judged.score),
        "note": _short(judged.note),
        "reply": pieces(judged.reply, limit),
    }


def pieces(text: object, limit: int) -> list[str | int]:
    """``[text]``, or of a longer one ``[beginning, number of characters left out, end]``: answers stand at the end."""
    words = str(text)
    if len(words) <= limit:
        return [visible(words)]
    tail = limit // 2
    return [visible(words[: limit - tail]), len(words) - limit, visible(words[len(words) - tail :])]


def _short(text: object, limit: int = _SHORT_CHARACTERS) -> str:
    words = str(text)
    return visible(words) if len(words) <= limit else visible(words[:limit]) + " …"


def _gold_options(answered: Answered, options: list[str]) -> list[int]:
    """Places of the right options among those shown."""
    if answered.kind not in ("multiple_choice", "multiple_select"):
        return []
    letters = right_letters(str(answered.gold))
    return [place for place, option in enumerate(options) if str(option).split(".", 1)[0] in letters]

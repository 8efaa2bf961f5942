"""The questions of a results folder as pieces of the page: an index to filter by, pages of questions, pictures.

The index and each page are JSON, compressed and in base64, so that nothing in them can end a script element; the
browser unpacks a page of questions when it shows one of them.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_pg.eval.contracts import Answered, Output
from vlm_pg.eval.report.results import Marks, Results, label
from vlm_pg.observe.report.rollouts import read_picture
from vlm_pg.observe.text import one_line, visible
from vlm_pg.types import right_letters

PAGE_QUESTIONS = 200
# Outcomes of a question, by its score (mean@n).
WRONG, PARTLY, RIGHT, NO_VALUE = range(4)
# Flags to filter by; a question has the sum of those that apply.
UNPARSED, DISAGREEING, TRUNCATED, BAD_MEDIA, OTHERS_DIFFER, JUDGED = 1, 2, 4, 8, 16, 32

_MAX_OUTPUTS, _MAX_MARKS = 64, 32
_OPTION_CHARACTERS, _SHORT_CHARACTERS, _PREVIEW_CHARACTERS = 500, 300, 130

HEIGHT, WIDTH = 130, 1280  # of a strip of frames at most, in pixels
_KEPT_BYTES = 8_000  # a JPEG up to this size is embedded unchanged
_QUALITY = 60
_CHUNK_CHARACTERS = 1_000_000
# Of the questions that have a strip of frames, by set and index: where it is in the page, or why it is not.
_Strips = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Room:
    """Limits of a report's size.

    Args:
        text, frames: characters of the compressed texts and of the strips of frames in the page.
        questions: at most.
        lengths: characters to which a text is cut; the first with which all questions fit, or the last.
    """

    text: int = 60_000_000
    frames: int = 28_000_000
    questions: int = 40_000
    lengths: tuple[int, ...] = (8000, 4000, 2000, 1000, 400)


@dataclass
class Embedded:
    """The questions in the page. ``left_out``: sentences on what it lacks."""

    index: str
    pages: list[str]
    frames: list[str]
    left_out: list[str]
    num_questions: int


def embed(results: Results, others: Sequence[tuple[str, Marks]], room: Room | None = None) -> Embedded:
    """Pack a folder's questions for the page.

    Args:
        others: name and marks of results to compare each question with.
        room: its size; a little below 100 MB by default.
    """
    room = room or Room()
    pool = StripPool(results.folder)
    strips = _strips(results, room, pool)
    for length in room.lengths:
        pages = _Pages(length, room)
        for name, index, answered in _questions(results):
            marks = [of_run.get(name, {}).get(answered.sample_id) for _, of_run in others]
            scores = [None if mark is None else mark.score for mark in marks]
            if not pages.add(name, answered, strips.get((name, index)), scores):
                break
        pages.close_page()
        if not pages.full:
            break
    return Embedded(
        index=_compressed(pages.index([label(name) for name, _ in others])),
        pages=pages.pages,
        frames=pool.chunks(),
        left_out=_left_out(results, pages, strips),
        num_questions=pages.count,
    )


def _questions(results: Results) -> Iterator[tuple[str, int, Answered]]:
    """Set, index in its file, question."""
    for name in results.answers:
        for index, (answered, _) in enumerate(results.rows(name)):
            yield name, index, answered


def _strips(results: Results, room: Room, pool: StripPool) -> _Strips:
    """Add the questions' strips to the pool, as long as there is room.

    Sets share the room equally, and the next may use what one leaves. Within a set, questions that are not entirely
    right come first.
    """
    strips: _Strips = {}
    for done, name in enumerate(results.answers):
        limit = pool.size + (room.frames - pool.size) // (len(results.answers) - done)
        for right in (False, True):
            for index, (answered, shown) in enumerate(results.rows(name)):
                if shown.get("frames") and right == (outcome_of(answered) == RIGHT):
                    strips[name, index] = found = pool.add(shown["frames"][0], limit)
                    if found["why"] == NO_ROOM:
                        limit = 0  # a smaller one may not come before this one
    return strips


@dataclass
class _Pages:
    """Questions packed so far, with texts cut to ``length`` characters. ``full``: a page of them had no room."""

    length: int
    room: Room
    pages: list[str] = field(default_factory=list)
    count: int = 0
    full: bool = False
    _size: int = 0
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _columns: dict[str, list[Any]] = field(default_factory=dict)
    _sets: dict[str, int] = field(default_factory=dict)
    _categories: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, answered: Answered, strip: dict[str, Any] | None, scores: Sequence[float | None]) -> bool:
        """Add a question; False if there is no more room, for it or for the page that it completed."""
        if self.full or self.count >= self.room.questions:
            return False
        score = answered.score
        flags = flags_of(answered)
        if score is not None and any(other is not None and abs(other - score) > 1e-9 for other in scores):
            flags += OTHERS_DIFFER
        preview = one_line(str(answered.question)[: 4 * _PREVIEW_CHARACTERS])
        if len(preview) > _PREVIEW_CHARACTERS:
            preview = preview[: _PREVIEW_CHARACTERS - 1] + "…"
        row = {
            "set": self._sets.setdefault(label(name), len(self._sets)),
            "category": self._categories.setdefault(label(answered.category), len(self._categories)),
            "id": label(answered.sample_id),
            "text": preview,
            "outcome": outcome_of(answered),
            "flags": flags,
            "score": None if score is None else round(score, 4),
            "marks": marks_of(answered),
            "others": [None if other is None else round(other, 4) for other in scores],
        }
        for key, value in row.items():
            self._columns.setdefault(key, []).append(value)
        detail = detail_of(answered, self.length)
        if strip is not None:
            detail["strip"] = strip
        self._waiting.append(detail)
        self.count += 1
        if len(self._waiting) == PAGE_QUESTIONS:
            self.close_page()
        return not self.full

    def close_page(self) -> None:
        """Compress the questions of the open page; drop them if it is too large."""
        if not self._waiting:
            return
        page = _compressed(self._waiting)
        if self._size + len(page) > self.room.text:
            self.full = True
            self.count -= len(self._waiting)
            for column in self._columns.values():
                del column[self.count :]
        else:
            self.pages.append(page)
            self._size += len(page)
        self._waiting = []

    def index(self, others: Sequence[str]) -> dict[str, Any]:
        """The columns of all questions, which the browser keeps."""
        return {
            "page": PAGE_QUESTIONS,
            "sets": list(self._sets),
            "categories": list(self._categories),
            "others": list(others),
            "columns": self._columns,
        }


def _left_out(results: Results, pages: _Pages, strips: _Strips) -> list[str]:
    sentences = []
    total = sum(1 for _ in _questions(results))
    if pages.count < total:
        sentences.append(
            f"The first {pages.count:,} of {total:,} questions can be looked at here; the others are in the folder's "
            "answers files alone. Figures are of all of them."
        )
    if pages.length < pages.room.lengths[0]:
        sentences.append(
            f"Of texts longer than {pages.length:,} characters only beginning and end are shown here, to keep this "
            "file small; the whole is in the folder's answers files."
        )
    absent = sum(strip["why"] == NO_ROOM for strip in strips.values())
    if absent:
        sentences.append(
            f"Frames of {len(strips) - absent:,} of {len(strips):,} questions are shown; those of {absent:,} are left "
            "out to keep this file small. Questions that were not answered right came first."
        )
    return sentences + [
        f"{name}: {count:,} line(s) are no question with its answers and were left out."
        for name, count in results.damaged.items()
    ]


def _compressed(value: Any) -> str:
    """JSON in base64 of zlib's format, "deflate" to browsers."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


# ---- a question ----


def outcome_of(answered: Answered) -> int:
    """RIGHT: every output that counts scores 1; WRONG: every one scores 0; PARTLY: anything between."""
    score = answered.score
    if score is None:
        return NO_VALUE
    return RIGHT if score >= 1 else WRONG if score <= 0 else PARTLY


def flags_of(answered: Answered) -> int:
    """UNPARSED: some output gives no answer. DISAGREEING: outputs differ. TRUNCATED: some output was cut off.
    BAD_MEDIA: the question could not be asked. JUDGED: a judge model decided about some output.
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
    """A character per output, for the row of squares: its score in tenths ("0" to "9", "A" for 1), "-" without one."""
    scores = [one.reading.score if one.reading.counts else None for one in answered.outputs]
    tenths = ["-" if score is None else "0123456789A"[int(10 * min(max(score, 0.0), 1.0))] for score in scores]
    return "".join(tenths[:_MAX_MARKS]) + ("+" if len(tenths) > _MAX_MARKS else "")


def detail_of(answered: Answered, limit: int) -> dict[str, Any]:
    """All data of a question; texts longer than ``limit`` characters lose their middle."""
    has_letters = answered.kind in ("multiple_choice", "multiple_select")
    letters = right_letters(str(answered.gold)) if has_letters else set()
    return {
        "question": pieces(answered.question, limit),
        "options": [_short(option, _OPTION_CHARACTERS) for option in answered.options],
        "gold": _short(answered.gold, _OPTION_CHARACTERS),
        "gold_at": [index for index, option in enumerate(answered.options) if str(option).split(".", 1)[0] in letters],
        "kind": label(answered.kind),
        "cluster": _short(answered.cluster),
        "details": [
            [label(name), _short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]
            for name, value in answered.details.items()
        ],
        "fault": None if answered.fault is None else [label(answered.fault[0]), _short(answered.fault[1], 2000)],
        "outputs": [_output(one, limit) for one in answered.outputs[:_MAX_OUTPUTS]],
        "more_outputs": max(0, len(answered.outputs) - _MAX_OUTPUTS),
    }


def _output(one: Output, limit: int) -> dict[str, Any]:
    reading, judged = one.reading, one.judged
    return {
        "text": pieces(one.text, limit),
        "answer": None if reading.answer is None else _short(reading.answer),
        "score": reading.score,
        "note": _short(reading.note),
        "counts": reading.counts,
        "cut_off": one.finish_reason == "length",
        "tokens": one.num_tokens,
        "judged": judged
        and {
            "decided": judged.decided,
            "answer": None if judged.answer is None else _short(judged.answer),
            "score": judged.score,
            "note": _short(judged.note),
            "reply": pieces(judged.reply, limit),
        },
    }


def pieces(text: object, limit: int) -> list[str | int]:
    """``[text]``, or of a longer one ``[beginning, number of omitted characters, end]``: answers stand at the end."""
    words = str(text)
    if len(words) <= limit:
        return [visible(words)]
    tail = limit // 2
    return [visible(words[: limit - tail]), len(words) - limit, visible(words[len(words) - tail :])]


def _short(text: object, limit: int = _SHORT_CHARACTERS) -> str:
    words = str(text)
    return visible(words) if len(words) <= limit else visible(words[:limit]) + " …"


# ---- strips of frames ----

NO_ROOM = "left out to keep this file small"


class StripPool:
    """Collects strips of frames as small JPEGs; ``chunks`` are JSON lists of them in base64.

    Args:
        folder: the results folder; no picture outside of it is read.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._chunks: list[list[str]] = [[]]
        self._in_chunk = 0
        self.size = 0

    def chunks(self) -> list[str]:
        """The lists as JSON."""
        return [json.dumps(chunk, separators=(",", ":")) for chunk in self._chunks if chunk]

    def add(self, name: object, room: int) -> dict[str, Any]:
        """Add a strip by its path in the folder, unless the pool would become larger than ``room`` characters.

        Returns:
            ``{"at": [chunk, index], "why": ""}``, or why it is not there: ``{"at": None, "why": "..."}``.
        """
        if self.size >= room:
            return {"at": None, "why": NO_ROOM}
        try:
            strip = base64.b64encode(small_jpeg(read_picture(self._folder, str(name)))).decode("ascii")
        except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError) as error:
            return {"at": None, "why": visible(str(error))[:300]}
        if self.size + len(strip) > room:
            return {"at": None, "why": NO_ROOM}
        if self._in_chunk + len(strip) > _CHUNK_CHARACTERS and self._chunks[-1]:
            self._chunks.append([])
            self._in_chunk = 0
        self._chunks[-1].append(strip)
        self._in_chunk += len(strip)
        self.size += len(strip)
        return {"at": [len(self._chunks) - 1, len(self._chunks[-1]) - 1], "why": ""}


def small_jpeg(data: bytes) -> bytes:
    """A picture as a JPEG of a few kilobytes; a JPEG that is already small is returned unchanged.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: it is no picture that can be read.
    """
    if len(data) <= _KEPT_BYTES and data.startswith(b"\xff\xd8\xff"):
        return data
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
        image.draft("RGB", (2 * WIDTH, 2 * HEIGHT))
        small = image.convert("RGB")
    small.thumbnail((WIDTH, HEIGHT))
    target = io.BytesIO()
    small.save(target, "JPEG", quality=_QUALITY, optimize=True)
    return target.getvalue()

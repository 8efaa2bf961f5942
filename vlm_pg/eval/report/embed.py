"""The questions of a results folder as pieces of the page: an index to filter by, pages of questions, frames.

The index and each page are JSON, compressed and in base64, so that nothing in them can end a script element; the
browser unpacks a page of questions when one of them is shown.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.report import questions
from vlm_pg.eval.report.frames import FramePool
from vlm_pg.eval.report.results import Marks, Results, label, score_of

PAGE_QUESTIONS = 200
_Frames = dict[tuple[str, int], dict[str, Any] | None]


@dataclass(frozen=True)
class Room:
    """How large a report may become.

    ``text``, ``frames``: characters that the compressed texts and the thumbnails may take in the page.
    ``questions``: how many questions at most. ``lengths``: to how many characters a text is cut, ``frames_each``: how
    many frames of a question are taken: the first with which all of them fit; what does not fit with the last is left
    out.
    """

    text: int = 60_000_000
    frames: int = 28_000_000
    questions: int = 40_000
    lengths: tuple[int, ...] = (8000, 4000, 2000, 1000, 400)
    frames_each: tuple[int, ...] = (12, 8, 4)


@dataclass
class Embedded:
    """What the page carries of the questions. ``left_out``: sentences that say what it does not."""

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
    pool, frames, most = _take_frames(results, room)
    packed = None
    for length in room.lengths:
        packed = _Packed(length, room)
        for name, place, answered in _questions(results):
            scores = [_score_in(marks, name, answered) for _, marks in others]
            if not packed.add(name, answered, frames.get((name, place)), (name, place) in frames, scores):
                break
        packed.close_page()
        if not packed.full:
            break
    assert packed is not None
    return Embedded(
        index=_compressed(packed.index([label(name) for name, _ in others])),
        pages=packed.pages,
        frames=pool.chunks(),
        left_out=_left_out(results, packed, frames, most),
        num_questions=packed.count,
    )


def _questions(results: Results) -> Iterator[tuple[str, int, Answered]]:
    """Set, place in its file, question."""
    for name in results.answers:
        for place, (answered, _) in enumerate(results.rows(name)):
            yield name, place, answered


def _take_frames(results: Results, room: Room) -> tuple[FramePool, _Frames, int]:
    """The frames of each question that has some, None where there was no room, and how many of a question at most."""
    for most in room.frames_each:
        pool, frames = FramePool(results.folder), _Frames()
        if _fill(results, room, most, pool, frames):
            break
    return pool, frames, most


def _fill(results: Results, room: Room, most: int, pool: FramePool, frames: _Frames) -> bool:
    """Take ``most`` frames of a question. False as soon as one has no room, unless there is no smaller number to try.

    Sets share the room equally, and what one leaves the next may use. Of a set, questions that are not wholly right
    come first: they are what one looks at.
    """
    last = most == room.frames_each[-1]
    for done, name in enumerate(results.answers):
        limit = pool.size + (room.frames - pool.size) // (len(results.answers) - done)
        for right in (False, True):
            for place, (answered, shown) in enumerate(results.rows(name)):
                if shown.get("frames") and right == (questions.outcome_of(answered) == questions.RIGHT):
                    found = frames[name, place] = pool.add(shown, most, limit)
                    if found is None and not last:
                        return False
                    if found is None:
                        limit = 0  # from now on only frames that the pool has already
    return True


def _score_in(marks: Marks, name: str, answered: Answered) -> float | None:
    mark = marks.get(name, {}).get(str(answered.sample_id))
    return None if mark is None else mark.score


@dataclass
class _Packed:
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

    def add(
        self,
        name: str,
        answered: Answered,
        frames: dict[str, Any] | None,
        has_frames: bool,
        scores: Sequence[float | None],
    ) -> bool:
        """Take a question; False if there is no more room, for it or for the page that it was the last of."""
        if self.full or self.count >= self.room.questions:
            return False
        score = score_of(answered)
        flags = questions.flags_of(answered)
        if score is not None and any(other is not None and abs(other - score) > 1e-9 for other in scores):
            flags += questions.OTHERS_DIFFER
        row = {
            "set": self._sets.setdefault(label(name), len(self._sets)),
            "category": self._categories.setdefault(label(answered.category), len(self._categories)),
            "id": label(answered.sample_id),
            "text": questions.preview_of(answered),
            "outcome": questions.outcome_of(answered),
            "flags": flags,
            "score": None if score is None else round(score, 4),
            "marks": questions.marks_of(answered),
            "others": [None if other is None else round(other, 4) for other in scores],
        }
        for key, value in row.items():
            self._columns.setdefault(key, []).append(value)
        detail = questions.detail_of(answered, self.length)
        if has_frames:
            detail["frames"] = frames or {"at": [], "seconds": [], "why": "left out to keep this file small"}
        self._waiting.append(detail)
        self.count += 1
        if len(self._waiting) == PAGE_QUESTIONS:
            self.close_page()
        return not self.full

    def close_page(self) -> None:
        """Compress the questions that wait for their page to fill; drop them again if it is too large."""
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
        """What the browser keeps of all questions, a column a key."""
        return {
            "page": PAGE_QUESTIONS,
            "sets": list(self._sets),
            "categories": list(self._categories),
            "others": list(others),
            "columns": self._columns,
        }


def _left_out(results: Results, packed: _Packed, frames: _Frames, most: int) -> list[str]:
    said = []
    total = sum(1 for _ in _questions(results))
    if packed.count < total:
        said.append(
            f"The first {packed.count:,} of {total:,} questions can be looked at here; the others are in the folder's "
            "answers files alone. Figures are of all of them."
        )
    if packed.length < packed.room.lengths[0]:
        said.append(
            f"Of texts longer than {packed.length:,} characters only beginning and end are shown here, to keep this "
            "file small; the whole is in the folder's answers files."
        )
    if most < packed.room.frames_each[0] and frames:
        said.append(f"At most {most} frames of a question are shown, evenly spaced, to keep this file small.")
    absent = sum(found is None for found in frames.values())
    if absent:
        said.append(
            f"Frames of {len(frames) - absent:,} of {len(frames):,} questions are shown; those of {absent:,} are left "
            "out to keep this file small. Questions that were not answered right came first."
        )
    said += [
        f"{name}: {count:,} line(s) are no question with its answers and were left out."
        for name, count in results.damaged.items()
    ]
    return said


def _compressed(value: Any) -> str:
    """JSON in base64 of zlib's format, "deflate" to browsers."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")

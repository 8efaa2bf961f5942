"""Questions that are asked twice of the same media: kept, and told of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from vlm_pg.data.dedup import Ledger, path_key, text_key
from vlm_pg.errors import printable
from vlm_pg.types import Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts


@dataclass(frozen=True)
class Repeat:
    """A kept question that was asked before. ``answers``: whether its gold answer is that of the first one."""

    sample_id: str
    first: str
    answers: Literal["same", "other"]
    where: str

    def __str__(self) -> str:
        question, first = printable(self.sample_id, 200), printable(self.first, 200)
        told = "the same answer" if self.answers == "same" else "another answer: one of them is wrong"
        return f"with {told}, for example {question} asks what {first} asks"

    def line(self) -> bytes:
        """As ``repeated.jsonl`` has it."""
        return (json.dumps(asdict(self), ensure_ascii=True) + "\n").encode()


class Repeats:
    """Knows the questions of a set: text, options, and content and part of the media, whatever files are called and
    however texts are spaced."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def of(self, sample: Sample, facts: Sequence[MediaFacts]) -> Repeat | None:
        """Whether a question was asked before; if not, it is now."""
        contents = [one.content for one in facts] or [path_key(ref.path) for ref in sample.media]
        parts = [
            (ref.kind, ref.folder_fps, ref.start, ref.end, ref.times, path_key(ref.subtitles)) for ref in sample.media
        ]
        texts = [text_key(text) for text in (sample.question, *sample.options)]
        asked = _digest([texts, contents, parts])
        answer = _digest([sample.answer_kind, sample.answer])
        if self._ledger.add("asked", asked, f"{answer} {sample.sample_id}"):
            return None
        before_answer, _, first = (self._ledger.look("asked", asked) or "").partition(" ")
        return Repeat(sample.sample_id, first, "same" if answer == before_answer else "other", sample.where)


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()

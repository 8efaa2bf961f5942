"""Questions as evaluation sets have them."""

from __future__ import annotations

from typing import Any

from vlm_pg.types import AnswerKind, MediaRef, Sample

CAT_OR_DOG = ("A. a cat", "B. a dog")


def question_of(
    kind: AnswerKind, question: str = "Who is seen?", options: tuple[str, ...] = (), subtitles: str = "", **details: Any
) -> Sample:
    media = (MediaRef("video", "1.mp4", subtitles=subtitles),)
    return Sample("1", question, media, options, "A", kind, "set", "kind", details=details)


def choice(**details: Any) -> Sample:
    return question_of("multiple_choice", options=CAT_OR_DOG, **details)

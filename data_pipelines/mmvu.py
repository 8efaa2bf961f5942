"""MMVU: expert questions on videos of 27 subjects, with options and open, to checked records; for evaluation only.

    vlm-pg prepare mmvu MMVU --out data/mmvu
    vlm-pg prepare mmvu --eval validation.json --media-root MMVU --out data/mmvu

Published: yale-nlp/MMVU ``validation.json`` (on GitHub ``data/validation.json``), 1,000 rows: ``id``, ``video`` (an
address that ends in ".../videos/<Subject>/<n>.mp4"), ``question_type`` (multiple-choice 625, open-ended 375),
``metadata`` with ``subject``, ``question``, ``choices`` (an object of A to E; five empty texts where the question is
open), ``answer`` (a letter or a text). lmms-lab's copy has ``video_path`` beside ``video`` and is Parquet. The videos
are ``videos/<Subject>/<n>.mp4`` below the media root, or in a folder ``MMVU`` there; they are numbered anew for each
subject, so only the path counts. Of the test set the answers are not public.

An open answer is yes/no, numerical or mathematics where it is just that, else the text itself (exact): MMVU itself has
open answers judged by a model. Evaluation reports by subject; ``details`` have ``subject`` and ``question_type``.

Licence: see the card (yale-nlp/MMVU). The videos are those of people on YouTube.

Record: {"problem_id": "validation_1", "problem": "... how many grams of precipitate are produced approximately?",
"data_type": "video", "problem_type": "multiple choice", "options": ["A. 10.0", "B. 5.0", "C. 12.0", "D. 15.0",
"E. 20.0"], "process": "", "solution": "<answer>A</answer>", "path": "videos/Chemistry/0.mp4", "data_source": "mmvu",
"category": "Chemistry", "details": {"subject": "Chemistry", "question_type": "multiple-choice"}}
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from data_pipelines.engine.answers import answered, letter_of, lettered, open_answer
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.fields import answer_text, first_of, named, object_of, published, text_of, unusable

_CHOICE, _OPEN = "multiple-choice", "open-ended"
_VIDEOS = "videos"


def to_record(row: Row) -> dict[str, Any]:
    # The video's address or path from the folder of the videos on.
    name = text_of(row, "video_path", "video").strip()
    parts = PurePosixPath(unquote(name) if "://" in name else name).parts
    if _VIDEOS not in parts[:-1]:
        raise unusable("bad_media", f"the video is '{name[:200]}'", f"An address with /{_VIDEOS}/ in it")
    path = PurePosixPath(*parts[parts.index(_VIDEOS) :])
    # The subject as the metadata name it, else as the video's folder does: "Computer Science".
    metadata = row.get("metadata")
    subject = first_of(metadata, "subject") if isinstance(metadata, Mapping) else None
    subject = path.parent.name.replace("_", " ") if subject is None else subject
    return {
        "problem": text_of(row, "question"),
        **_answer(row),
        "path": path.as_posix(),
        "category": subject,
        "details": {"subject": subject, **published(row, "question_type")},
    }


def _answer(row: Row) -> dict[str, Any]:
    """The fields of a record that say how its answer is checked."""
    kind, gold = text_of(row, "question_type"), answer_text(row, "answer")
    if kind not in (_CHOICE, _OPEN):
        raise unusable("unknown_question_type", f"'question_type' is '{kind[:80]}'", f"{_CHOICE} or {_OPEN}")
    options = lettered(_choices(row))
    if kind == _CHOICE:
        return answered("multiple choice", letter_of(gold, options), options)
    if options:
        raise unusable("bad_options", f"an open question has {len(options)} options", "None")
    return open_answer(gold)


def _choices(row: Row) -> list[str]:
    """The texts of the options from A on; those at the end that are empty are none."""
    choices = object_of(row.get("choices") or {}, "'choices'")
    letters = string.ascii_uppercase[: len(choices)]
    texts = [choices.get(letter, None) for letter in letters]
    if any(name not in letters for name in choices) or not all(text is None or isinstance(text, str) for text in texts):
        raise unusable("bad_options", f"'choices' is {str(dict(choices))[:80]}", "A text for each letter from A on")
    stripped = [(text or "").strip() for text in texts]
    while stripped and not stripped[-1]:
        stripped.pop()
    if not all(stripped):
        raise unusable("bad_options", f"'choices' is {str(dict(choices))[:80]}", "No empty text before another")
    return stripped


_FORM = Form(
    "validation.json",
    {"eval": ("validation.json", "data/validation.json", "MMVU/validation.json", ".:validation", ".:val")},
    (("video", "video_path"), "question_type", "question", "choices", "answer"),
    to_record,
    questions=named("id"),
    suffixes=(".json", ".jsonl", ".parquet"),
)
MMVU = DataSet("mmvu", (_FORM,), media=("MMVU",), by_name=False)
main = pipeline(MMVU, __doc__, __name__)

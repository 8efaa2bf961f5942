"""MMVU: yale-nlp's validation.json, as on the hub and on GitHub; rows of it in Parquet, with paths."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import AnswerKind, Sample

HUB = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos"
NONE = dict.fromkeys("ABCDE", "")
FIVE = {"A": "10.0", "B": "5.0", "C": "12.0", "D": "15.0", "E": "20.0"}


def row(number: int, file: str, answer: str, choices: dict[str, str], **changes: Any) -> dict[str, Any]:
    subject = file.split("/")[0].replace("_", " ")
    found = {"id": f"validation_{number}", "video": f"{HUB}/{file}", "youtube_url": " https://youtu.be/x"}
    found |= {"question_type": "open-ended" if choices is NONE else "multiple-choice"}
    found |= {"metadata": {"subject": subject, "textbook": "A book", "knowledge": ["https://en.wikipedia.org"]}}
    return found | {"question": "What is shown?", "choices": choices, "answer": answer} | changes


ROWS = [
    row(0, "Art/0.mp4", "Dolly Zoom", NONE),
    row(1, "Chemistry/0.mp4", "A", FIVE),
    row(2, "Modern_Physics/3.mp4", "E", FIVE),
    row(3, "Art/0.mp4", "48", NONE, question="How many are there?"),
    row(4, "Art/0.mp4", "Yes", NONE, question="Is it?"),
    row(5, "Art/0.mp4", "0.286", NONE, question="How much is it?"),
    row(6, "Art/0.mp4", "84 g/mol", NONE, question="Which mass?"),
    row(7, "Chemistry/0.mp4", "D", FIVE | {"E": ""}, question="Which?"),
    row(8, "Chemistry/0.mp4", "E", FIVE | {"E": ""}, question="Which one?"),
    row(9, "Chemistry/0.mp4", "E", FIVE | {"B": ""}),
    row(10, "Chemistry/9.mp4", "E", FIVE),
    row(11, "Chemistry/0.mp4", "", FIVE),
    row(12, "Chemistry/0.mp4", "x", NONE, question_type="essay"),
    row(13, "Chemistry/0.mp4", "A", FIVE, question_type="open-ended"),
    row(14, "Chemistry/0.mp4", "A", FIVE, video="https://www.youtube.com/watch?v=x"),
]
LETTERED = tuple(f"{letter}. {text}" for letter, text in FIVE.items())


def sample(
    number: int,
    path: str,
    kind: AnswerKind,
    answer: str,
    question: str = "What is shown?",
    options: tuple[str, ...] = (),
) -> Sample:
    subject = path.split("/")[-2].replace("_", " ")
    details = {"subject": subject, "question_type": "multiple-choice" if options else "open-ended"}
    return Sample(
        f"validation_{number}", question, video(path), options, answer, kind, "mmvu", subject, details=details
    )


def kept(below: str) -> list[Sample]:
    art, chemistry = f"{below}videos/Art/0.mp4", f"{below}videos/Chemistry/0.mp4"
    return [
        sample(0, art, "exact", "Dolly Zoom"),
        sample(1, chemistry, "multiple_choice", "A", options=LETTERED),
        sample(2, f"{below}videos/Modern_Physics/3.mp4", "multiple_choice", "E", options=LETTERED),
        sample(3, art, "numerical", "48", "How many are there?"),
        sample(4, art, "yes_no", "yes", "Is it?"),
        sample(5, art, "mathematics", "0.286", "How much is it?"),
        sample(6, art, "exact", "84 g/mol", "Which mass?"),
        sample(7, chemistry, "multiple_choice", "D", "Which?", LETTERED[:4]),
    ]


def refused(file: str) -> list[tuple[str, str, str]]:
    reasons = ["answer_not_in_options", "bad_options", "missing_media", "no_gold_answer", "unknown_question_type"]
    reasons += ["bad_options", "bad_media"]
    return [(f"{file}{number + 1}", f"validation_{number}", reason) for number, reason in enumerate(reasons, start=8)]


VIDEOS = ("videos/Art/0.mp4", "videos/Chemistry/0.mp4", "videos/Modern_Physics/3.mp4")
SHARD = "validation-00000-of-00001.parquet"
WITH_PATHS = [
    one | {"video_path": one["video"].removeprefix(HUB.removesuffix("videos")), "metadata": None} for one in ROWS
]

CASES = {
    "the hub": Published(
        # A file of the same name in another folder is another video.
        {"validation.json": ROWS, **media(*VIDEOS, "other/9.mp4")},
        (),
        kept(""),
        refused("validation.json:1, record "),
    ),
    "Parquet with paths, no metadata": Published(
        {f"data/{SHARD}": WITH_PATHS, **media(*VIDEOS)}, (), kept(""), refused(f"{SHARD}:")
    ),
}

"""``vlm-pg prepare`` on whole published files and on real media: every row is the record that its file says."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.published.case import records, refusals, video
from vlm_pg.cli import main
from vlm_pg.types import Sample


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_gsm8k(file: str, number: int, row: dict[str, Any]) -> Sample:
    worked, gold = row["answer"].split("\n#### ")
    before, *calculated = worked.split("<<")
    process = before + "".join(part.split(">>")[1] for part in calculated)
    answer = gold.replace(",", "")
    return Sample(f"{file}-{number}", row["question"], (), (), answer, "numerical", "gsm8k", "gsm8k", process.strip())


@pytest.mark.parametrize("training", [pytest.param(True, marks=pytest.mark.matrix), False])
def test_gsm8k(data_dir: Path, tmp_path: Path, training: bool) -> None:
    train, test = data_dir / "gsm8k_train.jsonl", data_dir / "gsm8k_test.jsonl"
    given = ["--train", str(train)] if training else []
    assert main(["prepare", "gsm8k", *given, "--eval", str(test), "--out", str(tmp_path)]) == 0
    for split, path, count in (("train", train, 7473), ("eval", test, 1319))[0 if training else 1 :]:
        expected = [of_gsm8k(path.stem, number, row) for number, row in enumerate(rows(path), start=1)]
        assert len(expected) == count and records(tmp_path, split) == expected
    assert refusals(tmp_path) == []


@pytest.mark.matrix
def test_math(data_dir: Path, tmp_path: Path) -> None:
    path = data_dir / "math500_test.jsonl"
    assert main(["prepare", "math", "--eval", str(path), "--out", str(tmp_path)]) == 0
    expected = [
        Sample(
            row["unique_id"],
            row["problem"],
            (),
            (),
            row["answer"],
            "mathematics",
            "math",
            row["subject"],
            row["solution"],
            details={"subject": row["subject"], "level": row["level"], "unique_id": row["unique_id"]},
        )
        for row in rows(path)
    ]
    assert len(expected) == 500 and records(tmp_path, "eval") == expected and refusals(tmp_path) == []


@pytest.mark.matrix
def test_nextqa(data_dir: Path, tmp_path: Path) -> None:
    path, out = data_dir / "nextqa_val.csv", tmp_path / "out"
    arguments = ["--eval", str(path), "--media-root", str(tmp_path), "--skip-media-check", "--out", str(out)]
    assert main(["prepare", "nextqa", *arguments]) == 0
    expected = []
    with path.open(encoding="utf-8", newline="") as file:
        _, *lines = csv.reader(file)
    for name, _, _, _, question, answer, qid, kind, *texts in lines:
        options = tuple(f"{letter}. {text.strip()}" for letter, text in zip("ABCDE", texts, strict=True))
        fields = (video(f"{name}.mp4"), options, "ABCDE"[int(answer)], "multiple_choice", "nextqa", kind)
        expected.append(Sample(f"{name}_{qid}", question, *fields, details={"type": kind, "qid": qid}))
    assert len(expected) == 4996 and records(out, "eval") == expected and refusals(out) == []


PANCAKE, NASA = video("flipping_a_pancake.mkv"), video("nasa_13013.mp4")
REAL = [
    Sample("1", "What does the person in the striped shirt hold in the hand for most of the video?", PANCAKE,
           ("A. a book", "B. a frying pan", "C. a guitar", "D. a telephone"), "B", "multiple_choice",
           "real-media", "real-media"),
    Sample("2", "What covers most of the picture at the very end of the video?", PANCAKE,
           ("A. the frying pan", "B. a second person", "C. the person's arm and hand close to the camera",
            "D. the kitchen window"), "C", "multiple_choice", "real-media", "real-media"),
    Sample("3", "In the middle of the video the view changes. What is seen up close then?", NASA,
           ("A. a worker on a lift beside large bright panels", "B. an aeroplane taking off",
            "C. a crowd of spectators", "D. a rocket engine firing"), "A", "multiple_choice",
           "real-media", "real-media"),
    Sample("4", "What colour is the lift that carries the worker?", NASA, (), "red", "free_form",
           "real-media", "real-media"),
    Sample("5", "A frame number is written on every frame. Which number is on the last frame?", video("h265_video.mp4"),
           (), "9", "numerical", "real-media", "real-media"),
    Sample("6", "Transcribe the text on the first frame.", video("h265_video.mp4"), (), "Frame 0", "ocr",
           "real-media", "real-media"),
    Sample("7", "How long is the video, in seconds?", video("av1_video.mkv"), (), "5.0", "regression",
           "real-media", "real-media"),
    Sample("8", "What object is filmed?", video("video_90.mov"),
           ("A. a keyboard", "B. a piano", "C. a chessboard", "D. a building"), "A", "multiple_choice",
           "real-media", "real-media"),
]  # fmt: skip
# What is in a file that is there is looked at when it is decoded.
CORRUPTED = Sample("101", "What happens?", video("corrupted.mp4"), ("A. x", "B. y"), "A", "multiple_choice",
                   "bad-media", "bad-media")  # fmt: skip
BAD = [
    ("questions_bad.json:3", "102", "missing_media"),
    ("questions_bad.json:4", "103", "outside_root"),
    ("questions_bad.json:5", "104", "remote_media"),
    ("questions_bad.json:6", "105", "empty_question"),
    ("questions_bad.json:7", "106", "media_token_in_text"),
]


@pytest.mark.parametrize(("name", "kept", "refused"), [("questions", REAL, []), ("questions_bad", [CORRUPTED], BAD)])
def test_questions_on_real_media(name: str, kept: list[Sample], refused: Any, media_dir: Path, tmp_path: Path) -> None:
    arguments = ["--train", str(media_dir / f"{name}.json"), "--media-root", str(media_dir), "--eval-share", "0"]
    assert main(["prepare", "video_r1", *arguments, "--out", str(tmp_path)]) == 0
    assert records(tmp_path, "train") == kept and refusals(tmp_path) == refused

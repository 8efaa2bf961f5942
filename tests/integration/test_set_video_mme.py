"""Video-MME the whole way: Parquet, videos and subtitles as published; asked with and without subtitles; scored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scored_sets import OUT, SILENT, PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

SHORT, MEDIUM, OTHER, LONG = "fFjv93ACGo8", "N1cdUjctpG8", "AbCdEfGhIjK", "-aB_cdEFgh1"
OPTIONS = ["A. Vitamin C.", "B. A dog.", "C. Plan B.", "D. A man."]


def row(number: str, video: str, duration: str, answer: str, task: str, **changes: Any) -> dict[str, Any]:
    asked = {"video_id": number[:3], "duration": duration, "domain": "Knowledge", "sub_category": "Biology"}
    asked |= {"url": f"https://www.youtube.com/watch?v={video}", "videoID": video, "question_id": number}
    asked |= {"task_type": task, "question": f"What is shown in {number}?", "options": OPTIONS, "answer": answer}
    return asked | changes


OCR, COUNTING, SPORTS = "OCR Problems", "Counting Problem", {"domain": "Sports", "sub_category": "Tennis"}
ROWS = [
    row("001-1", SHORT, "short", "A", OCR),
    row("001-2", SHORT, "short", "D", OCR),
    row("001-3", SHORT, "short", "B", COUNTING),
    row("301-1", MEDIUM, "medium", "C", OCR, **SPORTS),
    row("301-2", MEDIUM, "medium", "D", COUNTING, **SPORTS),
    row("301-3", MEDIUM, "medium", "B", COUNTING, **SPORTS),
    row("302-1", OTHER, "medium", "A", OCR),
    row("601-1", LONG, "long", "D", COUNTING),
    row("601-2", LONG, "long", "B", OCR),
    row("601-3", LONG, "long", "D", COUNTING),
    row("602-1", "gone", "long", "B", OCR),
]
# The first in the marks that lmms-eval looks for, the others plain. The third stands between two frames.
SAID = """1
00:00:00,900 --> 00:00:01,100
<font color="white" size=".72c">mind the gap</font>

2
00:00:02,000 --> 00:00:04,200
please stand clear

3
00:00:04,600 --> 00:00:04,900
of the doors
"""
FILES = {
    "videomme/test-00000-of-00001.parquet": ROWS,
    f"subtitle/{SHORT}.srt": SAID,
    f"subtitle/{OTHER}.srt": SAID,
    # 2 frames a second: 0, 0.5, ..., 9.5.
    f"data/{SHORT}.mp4": mp4(1, seconds=10),
    f"data/{MEDIUM}.mkv": mp4(2, seconds=30),
    f"data/{OTHER}.mp4": mp4(3, seconds=20),
    # 800 frames, of which at most 768 are shown.
    f"data/{LONG}.MP4": mp4(4, seconds=400),
}
# Question, output, what ours, the authors' rule (the first capital of A to D, some lead-ins removed) and lmms-eval's
# (letters ranked by form: at the start, at the end, behind a phrase, ...) say of it.
TABLE = [
    ("001-1", "(A) Vitamin C.", ("A", 1), ("A", 1), ("C", 0)),
    ("001-2", "A man is walking, so the answer is D.", ("D", 1), ("A", 0), ("A", 0)),
    ("001-3", "Based on the video, the answer is A.", ("A", 0), ("B", 1), ("A", 0)),
    ("301-1", "**Answer: C. Plan B.**", ("C", 1), ("A", 0), ("B", 0)),
    ("301-2", "<answer>D</answer>", ("D", 1), ("D", 1), ("D", 1)),
    ("301-3", "", (None, 0), OUT, (None, 0)),
    ("302-1", None, SILENT, SILENT, SILENT),
    ("601-1", "I cannot tell.", (None, 0), OUT, (None, 0)),
    ("601-2", "The correct answer is B", ("B", 1), ("B", 1), ("B", 1)),
    ("601-3", "I first thought of D, but it is C.", (None, 0), ("D", 1), ("C", 0)),
]
MEAN, NOTE = "mean over questions", "1 of 10 questions have no output: '302-1'."
SCORES = [
    # 001: 1, 1, 0; 301: 1, 1, 0; 601: 0, 1, 0. Five of nine.
    Scores(
        "video_mme/official",
        "ours",
        "ours",
        5 / 9,
        {MEAN: 5 / 9},
        {"total": 10, "scored": 9, "no_output": 1, "unparsed": 3},
        {
            "duration": {"short": (2 / 3, 3), "medium": (2 / 3, 3), "long": (1 / 3, 3)},
            # OCR: 001-1, 001-2, 301-1, 601-2, all right; counting: 301-2 alone of five.
            "task_type": {OCR: (1, 4), COUNTING: (1 / 5, 5)},
            "domain": {"Knowledge": (3 / 6, 6), "Sports": (2 / 3, 3)},
            "sub_category": {"Biology": (3 / 6, 6), "Tennis": (2 / 3, 3)},
        },
        [NOTE],
    ),
    # 001: 1, 0, 1; 301: 0, 1, out; 601: out, 1, 1. What is not read leaves the denominator: five of seven.
    Scores(
        "video_mme/official",
        "published",
        "video_mme/official",
        5 / 7,
        {MEAN: 5 / 7},
        {"total": 10, "scored": 7, "no_output": 1, "no_value": 2, "unparsed": 2, "left_out": 2},
        {
            "duration": {"short": (2 / 3, 3), "medium": (1 / 2, 2), "long": (1, 2)},
            # OCR: 1, 0, 0, 1; counting: 001-3, 301-2, 601-3.
            "task_type": {OCR: (2 / 4, 4), COUNTING: (1, 3)},
        },
        [NOTE],
    ),
    # lmms-eval counts what it does not read as wrong: 301-2 and 601-2 of nine.
    Scores(
        "video_mme/lmms",
        "published",
        "video_mme/lmms",
        2 / 9,
        {MEAN: 2 / 9},
        {"total": 10, "scored": 9, "no_output": 1, "unparsed": 2},
        {"duration": {"short": (0, 3), "medium": (1 / 3, 3), "long": (1 / 3, 3)}},
        [NOTE],
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("video_mme"), "video_mme", FILES)


def test_rows_become_records_and_a_video_that_is_not_there_is_said(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [one["question_id"] for one in ROWS[:-1]]
    assert prepared.refused == {"602-1": "missing_media"}
    # Those of two videos without a file.
    assert prepared.report["without_subtitles"] == 6


ASKED = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the "
    "letter (A, B, C, or D) of the correct option.\nWhat is shown in {}?\nA. Vitamin C.\nB. A dog.\nC. Plan B.\n"
    "D. A man.\nThe best answer is:"
)
HEAD = "This video's subtitles are listed below:\n"


def test_asked_without_subtitles(prepared: PreparedSet) -> None:
    """Two frames a second, at most 768 of the 800 of the long one, evenly from the first to the last."""
    asked = prepared.prompts("video_mme/official")
    assert {name: line["user"] for name, line in asked.items()} == {name: ASKED.format(name) for name in asked}
    assert list(asked) == list(prepared.samples)
    (short,), (long,) = asked["001-1"]["media"], asked["601-1"]["media"]
    assert short["frame_seconds"] == [number / 2 for number in range(20)]
    assert len(long["frame_seconds"]) == 768 and long["frame_seconds"][-1] == 399.5
    # 48 x 64 enlarged to at least 37,632 pixels: 3.5 times each side.
    assert (short["height"], short["width"], short["sampled_fps"]) == (168, 224, 2.0)
    settings = asked["001-1"]["settings"]
    assert settings["max_new_tokens"] == 1024 and settings["sampling"]["temperature"] == 0
    assert (settings["reader"], settings["aggregation"]) == ("video_mme/official", "video_mme")


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        # At a frame: 1.0 s; 2.0 to 4.0 s; none from 4.6 to 4.9 s.
        ("official_subtitles", "mind the gap\nplease stand clear\n"),
        # For each frame the first that covers it, ends excluded: 2.5, 3.0, 3.5 and 4.0 s.
        ("kit_subtitles", "mind the gap\n" + 4 * "please stand clear\n"),
        ("qwen3_vl_subtitles", "mind the gap please stand clear\n"),
    ],
)
def test_subtitles_are_those_at_the_frames(prepared: PreparedSet, protocol: str, said: str) -> None:
    asked = prepared.prompts(f"video_mme/{protocol}")
    head = f"\nThese are the frames of a video. {HEAD}" if protocol == "kit_subtitles" else HEAD
    assert all(asked[name]["user"].startswith(f"{head}{said}Select the best") for name in ("001-1", "001-2", "001-3"))
    # Without a file of subtitles the authors' and Qwen's words leave the header out.
    assert (HEAD in asked["301-1"]["user"]) == (protocol == "kit_subtitles")


def test_lmms_eval_shows_32_frames_and_says_where_there_are_no_subtitles(prepared: PreparedSet) -> None:
    asked = prepared.prompts("video_mme/lmms_subtitles")
    assert asked["301-1"]["user"].startswith(
        "This video's subtitles are listed below: \nNo subtitles available\nSelect the best answer to the following "
        "multiple-choice question based on the video and the subtitles."
    )
    (medium,) = asked["301-1"]["media"]
    # 60 frames: 59 / 31 frames of half a second lie between two that are shown.
    assert len(medium["frame_seconds"]) == 32 and medium["frame_seconds"][:3] == [0, 1.0, 2.0]
    assert medium["frame_seconds"][-1] == 29.5
    assert asked["301-1"]["settings"]["max_new_tokens"] == 16
    # 32 of 40 frames are 39 / 31 halves of a second apart: places 0, 1, 3, 4, 5, 6, 8, 9, 10 (5.0 s), ...: 2.0 to 4.0 s
    # are within the second text, and no place is 2 (1.0 s), within the first.
    assert [second for second in asked["302-1"]["media"][0]["frame_seconds"] if second < 3] == [0, 0.5, 1.5, 2, 2.5]
    assert asked["302-1"]["user"].startswith(f"{HEAD[:-1]} \nplease stand clear\nSelect the best answer")
    # All of 20 frames, of which every text but the third has one.
    assert asked["001-1"]["media"][0]["frame_seconds"] == [number / 2 for number in range(20)]
    assert asked["001-1"]["user"].startswith(f"{HEAD[:-1]} \nmind the gap\nplease stand clear\nSelect the best answer")


TASK = (
    "Select the best answer to the following multiple-choice question based on the video{}. Respond with only the "
    "letter (A, B, C, or D) of the correct option.\n"
)
CHOICES = "What is shown in 301-1?\nA. Vitamin C.\nB. A dog.\nC. Plan B.\nD. A man."
OTHERS = {
    "lmms": f"{TASK.format(' and the subtitles')}{CHOICES}\n\nAnswer with the option's letter from the given choices "
    "directly.",
    "lmms_qwen3_vl": f"Question: {CHOICES[:23]}\nOptions:{CHOICES[23:]}\nAnswer with the option letter only.",
    "kit": f"\nThese are the frames of a video. {TASK.format('')}Question: {CHOICES}\nAnswer: ",
    "qwen3_vl": f"{TASK.format('')}Question: {CHOICES}\nThe best answer is:",
}


@pytest.mark.parametrize("whose", OTHERS)
def test_the_words_of_others(prepared: PreparedSet, whose: str) -> None:
    assert prepared.prompts(f"video_mme/{whose}")["301-1"]["user"] == OTHERS[whose]


def test_qwen3_vl_shows_at_most_512_frames_and_samples(prepared: PreparedSet) -> None:
    for protocol, tokens, sampling in (
        ("qwen3_vl", 32768, (0.7, 0.8, 20, 1.5, 3407)),
        ("qwen3_vl_thinking", 40960, (0.6, 0.95, 20, 0.0, 1234)),
    ):
        asked = prepared.prompts(f"video_mme/{protocol}")["601-1"]
        assert len(asked["media"][0]["frame_seconds"]) == 512 and asked["settings"]["max_new_tokens"] == tokens
        names = ("temperature", "top_p", "top_k", "presence_penalty", "seed")
        assert tuple(asked["settings"]["sampling"][name] for name in names) == sampling


@pytest.mark.parametrize("place", range(3), ids=["ours", "official", "lmms"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])

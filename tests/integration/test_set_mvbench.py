"""MVBench the whole way: a file a task, clips of five tasks; asked as the authors, lmms-eval and Qwen do; scored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scored_sets import OUT, SILENT, PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

TEXTS = ["Sat down.", "Took the cup.", "Left."]


def row(video: str, answer: str, **changes: Any) -> dict[str, Any]:
    return {"video": video, "question": "What came after it?", "candidates": TEXTS, "answer": answer} | changes


FILES = {
    # Of seconds 2 to 6, up to 4 s, and of a clip that is longer than the video.
    "json/action_sequence.json": [
        row("ZS9XR.mp4", "Took the cup.", start=2.0, end=6.0),
        row("ZS9XR.mp4", "Sat down.", question="And then?", start=0, end=4),
        row("ZS9XR.mp4", "Left.", question="What is last?", start=7.0, end=24.8),
        row("ZS9XR.mp4", "Left.", question="What is it of?"),
    ],
    # Rows of other tasks are about the whole video.
    "json/action_antonym.json": [row("166583.webm", "Took the cup.", start=1.0, end=2.0)],
    "json/moving_count.json": [
        row("video_10309.mp4", "3", candidates=["2", "4", "3", "1"]),
        row("video_10309.mp4", "4", candidates=["2", "4", "3", "1"], question="How many move then?"),
    ],
    # A video of the same name from another set.
    "json/state_change.json": [
        row("video_10309.mp4", "Took the cup."),
        row("video_10309.mp4", "Took the cup.", question="And then?"),
        row("video_10309.mp4", "Left.", question="What is last?"),
    ],
    # 2 frames a second.
    "video/star/Charades_v1_480/ZS9XR.mp4": mp4(1, seconds=10),
    "video/ssv2_video/166583.webm": mp4(2, seconds=20),
    "video/clevrer/video_validation/video_10309.mp4": mp4(3, seconds=4),
    "video/perception/videos/video_10309.mp4": mp4(4, seconds=30),
}
# Question, output, what is said of it by: our reader; the authors' rule, to which the output is what follows "(" and
# whose first word must be part of "(b)" or contain it; lmms-eval's, the first lone letter a to e in any case.
TABLE = [
    ("action_antonym-1", "B) Took the cup.", ("B", 1), ("B", 1), ("B", 1)),
    ("action_sequence-1", "", (None, 0), (None, 1), OUT),
    ("action_sequence-2", "A man took the cup.", (None, 0), ("A", 1), ("A", 1)),
    ("action_sequence-3", "The answer is C", ("C", 1), (None, 0), ("C", 1)),
    ("moving_count-1", "**C**", ("C", 1), (None, 0), ("C", 1)),
    ("moving_count-2", "There is a man", (None, 0), (None, 0), ("A", 0)),
    ("state_change-1", "B", ("B", 1), ("B", 1), ("B", 1)),
    ("state_change-2", "b) because he holds it.\nOn reflection, C.", ("C", 0), ("B", 1), ("B", 1)),
    ("state_change-3", None, SILENT, SILENT, SILENT),
]
SILENCE = "1 of 9 questions have no output: 'state_change-3'."
ANTONYM, SEQUENCE, COUNT, CHANGE = "action_antonym", "action_sequence", "moving_count", "state_change"
TASKS = "The set has 20 tasks, and questions of 4 are here."
SCORES = [
    # Antonym 1; sequence 0, 0, 1; count 1, 0; state 1, 0: (1 + 1/3 + 1/2 + 1/2) / 4, where all questions give 4/8.
    Scores(
        "mvbench/qwen2_5_vl",
        "ours",
        "ours",
        7 / 12,
        {"mean of tasks": 7 / 12, "mean over questions": 4 / 8},
        {"total": 9, "scored": 8, "no_output": 1, "unparsed": 3},
        {"task": {"action_antonym": (1, 1), "action_sequence": (1 / 3, 3), COUNT: (0.5, 2), CHANGE: (0.5, 2)}},
        [TASKS, SILENCE],
    ),
    # 1; 1, 1, 0; 0, 0; 1, 1: (1 + 2/3 + 0 + 1) / 4, and 5/8. An empty output is right, as the authors' code has it.
    Scores(
        "mvbench/official",
        "published",
        "mvbench/official",
        2 / 3,
        {"mean of tasks": 2 / 3, "mean over questions": 5 / 8},
        {"total": 9, "scored": 8, "no_output": 1, "unparsed": 4},
        {"task": {"action_antonym": (1, 1), "action_sequence": (2 / 3, 3), COUNT: (0, 2), CHANGE: (1, 2)}},
        [TASKS, SILENCE],
    ),
    # 1; out, 1, 1; 1, 0; 1, 1: (1 + 1 + 1/2 + 1) / 4, and 6/7.
    Scores(
        "mvbench/lmms",
        "published",
        "mvbench/lmms",
        7 / 8,
        {"mean of tasks": 7 / 8, "mean over questions": 6 / 7},
        {"total": 9, "scored": 7, "no_output": 1, "no_value": 1, "unparsed": 1, "left_out": 1},
        {"task": {"action_antonym": (1, 1), "action_sequence": (1, 2), COUNT: (0.5, 2), CHANGE: (1, 2)}},
        [TASKS, SILENCE],
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("mvbench"), "mvbench", FILES)


def test_rows_become_records_named_after_task_and_place(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [question for question, *_ in TABLE]
    # It lacks its clip.
    assert prepared.refused == {"action_sequence-4": "missing_field"}
    paths = {name: sample.media[0].path for name, sample in prepared.samples.items()}
    assert paths["moving_count-1"] == "video/clevrer/video_validation/video_10309.mp4"
    assert paths["state_change-1"] == "video/perception/videos/video_10309.mp4"


SYSTEM = (
    "Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement of "
    "objects, and the action and pose of persons. Based on your observations, select the best option that accurately "
    "addresses the question.\n"
)
OPTIONS = "(A) Sat down.\n(B) Took the cup.\n(C) Left."
WORDS = {
    # The system message stands before the question once more.
    "official": f"{SYSTEM}Question: What came after it?\nOptions:\n{OPTIONS}\nOnly give the best option.",
    "lmms": f"Question:What came after it?\nOption:\n{OPTIONS}\nOnly give the best option.\n",
    # One message, without the comma before "and" (Qwen3-VL issue 715).
    "qwen2_5_vl": "Carefully watch the video and pay attention to the cause and sequence of events, the detail and "
    "movement of objects and the action and pose of persons.\nBased on your observations, select the best option that "
    f"accurately addresses the question.\nQuestion: What came after it?\nOptions:\n{OPTIONS}\nAnswer with the option's "
    "letter from the given choices directly and only give the best option.",
}
SYSTEMS = {"official": SYSTEM, "lmms": "You are a helpful assistant.", "qwen2_5_vl": ""}
LENGTHS = {"official": 100, "lmms": 16, "qwen2_5_vl": 1024}


@pytest.mark.parametrize("whose", WORDS)
def test_words_are_those_published(prepared: PreparedSet, whose: str) -> None:
    asked = prepared.prompts(f"mvbench/{whose}")["state_change-1"]
    assert asked["user"] == WORDS[whose]
    assert asked["system"] == SYSTEMS[whose]
    assert asked["answer_prefix"] == ("Best option:(" if whose == "official" else "")
    assert asked["settings"]["max_new_tokens"] == LENGTHS[whose]


def test_frames_are_those_of_the_clip(prepared: PreparedSet) -> None:
    """Two frames a second. Frames 4 to 12 of seconds 2 to 6 are 9, of which 8 are shown, 8/7 apart."""
    asked = prepared.prompts("mvbench/official")
    shown = {name: line["media"][0]["frame_seconds"] for name, line in asked.items()}
    # 4, 5.14, 6.29, 7.43, 8.57, 9.71, 10.86, 12 rounded.
    assert shown["action_sequence-1"] == [2, 2.5, 3, 3.5, 4.5, 5, 5.5, 6]
    # Frames 0 to 8; frames 14 to 19, the video's end.
    assert shown["action_sequence-2"] == [0, 0.5, 1, 1.5, 2.5, 3, 3.5, 4]
    assert shown["action_sequence-3"] == [7, 7.5, 8, 8.5, 9, 9.5]
    assert shown["action_antonym-1"] == [number / 2 for number in range(40)]
    medium = asked["action_sequence-1"]["media"][0]
    assert (medium["start"], medium["end"]) == (2.0, 6.0)


@pytest.mark.parametrize("place", range(3), ids=["ours", "official", "lmms"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])


def test_what_is_to_be_known_of_the_figures_is_printed(
    prepared: PreparedSet, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared.score(TABLE, 0, "mvbench/qwen2_5_vl", "ours")
    printed = capsys.readouterr()
    assert [(printed.out + printed.err).count(note) for note in (TASKS, SILENCE)] == [1, 1]

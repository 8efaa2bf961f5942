"""LongVideo-Reason the whole way: JSON lines with options in the question, videos in ten folders; asked; scored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scored_sets import PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

OPTIONS = "A. to play\nB. to build\nC. to cook\nD. to rest"


def row(number: int, kind: str, answer: str, video: str, options: str = OPTIONS) -> dict[str, Any]:
    found = {"problem_id": number, "problem": f"What is goal {number}?\n{options}", "data_type": "video"}
    found |= {"problem_type": kind, "reasoning": "Checking ...", "videos": f"longvila_videos/{video}"}
    return found | {"answer": f"<answer>{answer}</answer>"}


ROWS = [
    row(0, "goal", "A", "I_Q3ajyOrcI.webm"),
    row(1, "plot", "B", "I_Q3ajyOrcI.webm"),
    # Not in the order of their letters.
    row(2, "temporal", "D", "-a_b.mkv", "D. to rest\nA. to play\nB. to build\nC. to cook"),
    row(3, "temporal", "C", "-a_b.mkv"),
    row(4, "spatial", "A. to play", "-a_b.mkv"),
    row(5, "goal", "B", "soon_gone.mp4"),
    row(6, "goal", "C", "-a_b.mkv"),
    # As the published rows 379 and 857, and 147, 743 and 825: a letter and no options; another line among them.
    row(7, "plot", "B", "-a_b.mkv", ""),
    row(8, "plot", "B", "-a_b.mkv", f"A. But this asks to weigh both.\n{OPTIONS}"),
    row(9, "plot", "B", "gone.mp4"),
]
FILES = {
    "test.jsonl": ROWS,
    "longvideo_eval_subset0/I_Q3ajyOrcI.webm": mp4(1, seconds=400),
    "longvideo_eval_subset7/-a_b.mkv": mp4(2, seconds=20),
    "longvideo_eval_subset7/soon_gone.mp4": mp4(3, seconds=20),
}
# Question, output, what ours and the authors' rule say: the text of the first tags on one line, or the whole output,
# equals the answer.
TABLE = [
    ("test-1", "<think>B?</think> <answer>A</answer>", ("A", 1), ("A", 1)),
    ("test-2", "<answer>(B)</answer>", ("B", 1), ("(B)", 0)),
    ("test-3", "D", ("D", 1), ("D", 1)),
    ("test-4", "<answer>C.</answer>", ("C", 1), ("C.", 0)),
    ("test-5", "<answer>\nA\n</answer>", ("A", 1), ("<answer> A </answer>", 0)),
    ("test-6", "", (None, 0), (None, 0)),
    ("test-7", "<answer>A</answer> No: <answer>C</answer>", ("C", 1), ("A", 0)),
]
MEAN = "mean over questions"
SCORES = [
    # Goal 1, 0, 1; plot 1; temporal 1, 1; spatial 1.
    Scores(
        "longvideo_reason/official",
        "ours",
        "ours",
        6 / 7,
        {MEAN: 6 / 7},
        {"total": 7, "scored": 7, "unparsed": 1},
        {"problem_type": {"goal": (2 / 3, 3), "plot": (1, 1), "spatial": (1, 1), "temporal": (1, 2)}},
    ),
    # Goal 1, 0, 0; plot 0; temporal 1, 0; spatial 0.
    Scores(
        "longvideo_reason/official",
        "published",
        "longvideo_reason/long_rl",
        2 / 7,
        {MEAN: 2 / 7},
        {"total": 7, "scored": 7, "unparsed": 1},
        {"problem_type": {"goal": (1 / 3, 3), "plot": (0, 1), "spatial": (0, 1), "temporal": (1 / 2, 2)}},
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("longvideo_reason"), "longvideo_reason", FILES)


def test_rows_become_records_and_damaged_ones_are_refused(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [question for question, *_ in TABLE]
    assert prepared.refused == {"test-8": "too_few_options", "test-9": "bad_options", "test-10": "missing_media"}
    assert prepared.samples["test-5"].answer == "A"
    assert prepared.samples["test-1"].media[0].path == "longvideo_eval_subset0/I_Q3ajyOrcI.webm"


def test_words_frames_and_a_video_that_went_away(prepared: PreparedSet) -> None:
    """At most 768 of the 800 frames; the video of one question is removed after the set was prepared."""
    (prepared.raw / "longvideo_eval_subset7" / "soon_gone.mp4").unlink()
    asked = prepared.prompts("longvideo_reason/official")
    assert asked["test-1"]["user"] == (
        "You are a helpful assistant. The user asks a question, and then you solves it.\n\nPlease first think deeply "
        "about the question based on the given video, and then provide the final answer. The reasoning process and "
        "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
        "reasoning process here </think> <answer> answer here </answer>.\n\n Question: What is goal 0?\n" + OPTIONS
    )
    assert asked["test-3"]["user"].endswith("D. to rest\nA. to play\nB. to build\nC. to cook")
    assert len(asked["test-1"]["media"][0]["frame_seconds"]) == 768
    assert len(asked["test-3"]["media"][0]["frame_seconds"]) == 40
    assert asked["test-6"]["fault"]["reason"] == "missing_media" and "user" not in asked["test-6"]
    assert [name for name, line in asked.items() if "fault" in line] == ["test-6"]


@pytest.mark.parametrize("place", range(2), ids=["ours", "long_rl"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])

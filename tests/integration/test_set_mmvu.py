"""MMVU the whole way: validation.json with choices and open questions; asked as published; read, scored, averaged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scored_sets import SILENT, PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

HUB = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos"
NONE = dict.fromkeys("ABCDE", "")
FIVE = {"A": "10.0", "B": "5.0", "C": "12.0", "D": "15.0", "E": "20.0"}


def row(number: int, folder: str, answer: str, choices: dict[str, str], question: str = "") -> dict[str, Any]:
    found = {"id": f"validation_{number}", "video": f"{HUB}/{folder}/0.mp4", "youtube_url": "https://youtu.be/x"}
    found |= {"question_type": "open-ended" if choices is NONE else "multiple-choice"}
    found |= {"metadata": {"subject": folder.replace("_", " "), "textbook": "A book", "knowledge": []}}
    return found | {"question": question or f"How much is it in {number}?", "choices": choices, "answer": answer}


ROWS = [
    row(0, "Chemistry", "A", FIVE),
    row(1, "Modern_Physics", "E", FIVE),
    row(2, "Pharmacy", "B", FIVE),
    row(3, "Pharmacy", "D", FIVE | {"E": ""}),
    row(4, "Electrical_Engineering", "C", FIVE),
    row(5, "Art", "Dolly Zoom", NONE, "Which technique is shown?"),
    row(6, "Chemistry", "84 g/mol", NONE, "Which molar mass is it?"),
    row(7, "Art", "yes", NONE, "Is it a zoom?"),
    row(8, "Art", "0.286", NONE),
    row(9, "Electrical_Engineering", "4.5 µV", NONE, "Which voltage is shown?"),
    row(10, "Art", "48", NONE),
    row(11, "Law", "A", FIVE),
]
FOLDERS = ("Chemistry", "Modern_Physics", "Pharmacy", "Electrical_Engineering", "Art")
FILES = {
    "validation.json": ROWS,
    # All have the name 0.mp4: the path tells them apart.
    **{f"videos/{folder}/0.mp4": mp4(number, seconds=10 + number) for number, folder in enumerate(FOLDERS)},
}
V = "validation_"
# Question, output, what ours and lmms-eval's rule say, which takes any lone gold letter of an output for the answer,
# and for open ones an empty output, equal words beside another number, or equal digits of another unit.
TABLE = [
    (f"{V}0", "Therefore, the final answer is: A", ("A", 1), ("A", 1)),
    (f"{V}1", "It is B, not E.", ("B", 0), (None, 1)),
    (f"{V}2", "<answer>B</answer>", ("B", 1), ("B", 1)),
    (f"{V}3", "", (None, 0), (None, 0)),
    (f"{V}4", "C: 12.0", ("C", 1), ("C", 1)),
    (f"{V}5", "", (None, 0), (None, 1)),
    (f"{V}6", "48 g/mol", ("48 g/mol", 0), ("48 g/mol", 1)),
    (f"{V}7", "No, it is a pan.", ("no", 0), ("No, it is a pan.", 0)),
    (f"{V}8", "The answer is 0.286.", ("0.286", 1), ("The answer is 0.286.", 1)),
    (f"{V}9", "4.5 mV", ("4.5 mV", 0), ("4.5 mV", 1)),
    (f"{V}10", None, SILENT, SILENT),
]
MEAN, NOTE = "mean over questions", "1 of 11 questions have no output: 'validation_10'."
SCORES = [
    # Choices 1, 0, 1, 0, 1; open 0, 0, 0, 1, 0.
    Scores(
        "mmvu/official",
        "ours",
        "ours",
        4 / 10,
        {MEAN: 4 / 10, "multiple choice": 3 / 5, "open-ended": 1 / 5},
        {"total": 11, "scored": 10, "no_output": 1, "unparsed": 2},
        {
            # Chemistry 1, 0, physics 0; pharmacy 1, 0; engineering 1, 0; art 0, 0, 1.
            "group": {
                "Science": (1 / 3, 3),
                "Healthcare": (1 / 2, 2),
                "Engineering": (1 / 2, 2),
                "Humanities & Social Science": (1 / 3, 3),
            },
            "subject": {
                "Chemistry": (1 / 2, 2),
                "Modern Physics": (0, 1),
                "Pharmacy": (1 / 2, 2),
                "Electrical Engineering": (1 / 2, 2),
                "Art": (1 / 3, 3),
            },
            "question_type": {"multiple-choice": (3 / 5, 5), "open-ended": (1 / 5, 5)},
        },
        [NOTE],
    ),
    # Choices 1, 1, 1, 0, 1; open 1, 1, 0, 1, 1.
    Scores(
        "mmvu/lmms",
        "published",
        "mmvu/lmms",
        8 / 10,
        {MEAN: 8 / 10, "multiple choice": 4 / 5, "open-ended": 4 / 5},
        {"total": 11, "scored": 10, "no_output": 1, "unparsed": 3},
        {
            "group": {
                "Science": (1, 3),
                "Healthcare": (1 / 2, 2),
                "Engineering": (1, 2),
                "Humanities & Social Science": (2 / 3, 3),
            }
        },
        [NOTE],
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("mmvu"), "mmvu", FILES)


def test_rows_become_records_and_a_video_that_is_not_there_is_said(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [question for question, *_ in TABLE]
    assert prepared.refused == {f"{V}11": "missing_media"}
    kinds = [prepared.samples[f"{V}{number}"].answer_kind for number in range(5, 11)]
    assert kinds == ["exact", "exact", "yes_no", "mathematics", "exact", "numerical"]
    assert len(prepared.samples[f"{V}3"].options) == 4
    assert prepared.samples[f"{V}1"].media[0].path == "videos/Modern_Physics/0.mp4"


CHOICES = "A: 10.0\nB: 5.0\nC: 12.0\nD: 15.0\nE: 20.0"
WORDS = {
    "official": (
        f"\nQuestion: How much is it in 0?\n{CHOICES}\n\nAnswer the given multiple-choice question step by step. Begin "
        "by explaining your reasoning process clearly. Conclude by stating the final answer using the following "
        "format: 'Therefore, the final answer is: $LETTER' (without quotes), where $LETTER is one of the options. "
        "Think step by\nstep before answering.",
        "\nQuestion: Is it a zoom?\n\nAnswer the given question step by step. ",
    ),
    "official_direct": (
        f"\nQuestion: How much is it in 0?\n{CHOICES}\n\nDo not generate any intermediate reasoning process. Answer "
        "directly with the option letter from the given choices.\n",
        "\nQuestion: Is it a zoom?\n\nDo not generate any intermediate reasoning process. Directly output the final "
        "short answer.\n",
    ),
    "lmms": (
        f"\nQuestion:How much is it in 0?\n{CHOICES}\nVisual Information: processed video\nDo not generate any "
        "intermediate reasoning process. Answer directly with the option letter from the\ngiven choices.\n",
        "\nQuestion:Is it a zoom?\nVisual Information: processed video\nDo not generate any intermediate reasoning "
        "process. Directly output the final answer.\n",
    ),
}


@pytest.mark.parametrize("whose", WORDS)
def test_words_are_those_published(prepared: PreparedSet, whose: str) -> None:
    asked = prepared.prompts(f"mmvu/{whose}")
    assert asked[f"{V}0"]["user"] == WORDS[whose][0]
    assert asked[f"{V}7"]["user"].startswith(WORDS[whose][1])
    assert "E: " not in asked[f"{V}3"]["user"]
    if whose == "lmms":  # at most 32 frames: all 20
        assert asked[f"{V}0"]["media"][0]["frame_seconds"] == [number / 2 for number in range(20)]
        return
    # One frame a second. 10 of 20 frames are 19 / 9 apart: 0, 2.11, 4.22, 6.33, 8.44, 10.56, ... rounded, in halves.
    assert asked[f"{V}0"]["media"][0]["frame_seconds"] == [0, 1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5]
    sampling = asked[f"{V}0"]["settings"]["sampling"]
    assert (sampling["temperature"], sampling["seed"]) == (1.0, 215)


def test_lmms_evals_words_where_a_protocol_of_ones_own_shows_fewer_frames(prepared: PreparedSet, tmp_path: Any) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("base: mmvu/lmms\nsource: made up\nmedia: {min_frames: 8, max_frames: 8}\n")
    asked = prepared.prompts(str(own))
    assert (asked[f"{V}0"]["user"], asked[f"{V}7"]["user"]) == WORDS["lmms"]
    # 20 frames, 19 / 7 apart: 0, 2.71, 5.43, 8.14, 10.86, 13.57, 16.29, 19 rounded, in halves.
    assert asked[f"{V}0"]["media"][0]["frame_seconds"] == [0, 1.5, 2.5, 4, 5.5, 7, 8, 9.5]


@pytest.mark.parametrize("place", range(2), ids=["ours", "lmms"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])


def test_video_r1_reports_the_choices_alone(prepared: PreparedSet) -> None:
    """The whole text in the tags, or the whole output."""
    table = [
        (f"{V}0", "<think>B</think><answer>A</answer>", ("A", 1)),
        (f"{V}1", "E.", (None, 0)),
        (f"{V}2", "B", ("B", 1)),
        (f"{V}3", "<answer>(D)</answer>", (None, 0)),
        (f"{V}4", "<answer>B</answer>", ("B", 0)),
    ]
    figures = {MEAN: 2 / 5, "multiple choice": 2 / 5, "open-ended": None}
    counts = {"total": 5, "scored": 5, "unparsed": 2, "not_asked": 6}
    expected = Scores("mmvu/video_r1", "published", "mmvu/video_r1", 2 / 5, figures, counts)
    check_scores(prepared, table, 0, expected)

"""Video-MMMU the whole way: Parquet of three tracks; asked with the lecture and without; read, scored, averaged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.published.case import picture
from tests.support.scored_sets import OUT, PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

MATH, MEDICINE, ART = "validation_Math_15", "validation_Basic_Medical_Science_10", "new_Art_Theory_3"
DEV = [f"dev_Math_{number}" for number in range(1, 4)]
FOUR, ELEVEN = ["slope", "area", "mean", "sum"], [f"step {number}" for number in range(1, 12)]
FOURTEEN = [f"part {number}" for number in range(1, 15)]
# A list that lost a quotation mark, as it is published.
BROKEN = "['24/7', '3.429', '3.43]"


def row(name: str, question: str, answer: str, options: list[str], kind: str = "multiple-choice") -> dict[str, Any]:
    found = {"id": name, "question": question, "options": options, "answer": answer, "question_type": kind}
    return found | {"link_selected": "https://www.youtube.com/watch?v=x", "qa_type": "OCR"}


ADAPTATION = [
    row(MATH, "Which graph is it? <image 1>", "B", FOUR),
    row(MEDICINE, "How much is it in <image 1>?", "0.3", [], "open"),
    row(ART, "How many are in <image 1>?", BROKEN, [], "open"),
    row(DEV[0], "Which point is it in <image 1>?", "C", [], "open"),
    # Options, and no type: the authors' code asks it as an open one.
    row(DEV[1], "Which one is it in <image 1>?", "C", FOUR, "None"),
    row(DEV[2], "What is shown in <image 1>?", "Transformation", [], "open"),
]
SHARD = "test-00000-of-00001.parquet"
FILES = {
    f"Adaptation/{SHARD}": [one | {"image": {"bytes": picture(40), "path": None}} for one in ADAPTATION],
    f"Comprehension/{SHARD}": [
        row(MATH, "Which step is it?", "K", ELEVEN),
        row(MEDICINE, "Which step comes then?", "B", ELEVEN[:10]),
    ],
    f"Perception/{SHARD}": [
        row(MATH, "What is drawn at the end?", "C", FOUR),
        row(MEDICINE, "Which part comes last?", "N", FOURTEEN),
        row(ART, "Which colour?", "B", ["A. red", "B. blue"]),
    ],
    # 2 frames a second.
    f"Science/{MATH}.mp4": mp4(1, seconds=400),
    f"Medicine/{MEDICINE}.mp4": mp4(2, seconds=20),
    f"Art/{ART}.mp4": mp4(3, seconds=10),
    **{f"Science/{name}.mp4": mp4(10 + number, seconds=10) for number, name in enumerate(DEV)},
    # Three of the six pictures have a video of their own.
    f"question_only/{MATH}_image.mp4": mp4(4, seconds=2),
    f"question_only/{MEDICINE}_image.mp4": mp4(5, seconds=2),
    f"question_only/{DEV[1]}_image.mp4": mp4(6, seconds=2),
}
A, C, P, ALONE = "Adaptation_", "Comprehension_", "Perception_", "_question_only"
# Question, output, what ours, the authors' rule and lmms-eval's say. The authors' reads "A." before "(A)" before "A ",
# the last of the first form; open answers by what they contain. lmms-eval's ranks forms: at the start, at the end, ...
TABLE = [
    (f"{A}{MATH}", "B", ("B", 1), ("B", 1), ("B", 1)),
    (f"{A}{MEDICINE}", "0.286 or 0.3", (None, 0), ("0.286 or 0.3", 1), ("0.286 or 0.3", 1)),
    (f"{A}{ART}", "The answer is 3.43", ("3.43", 0), ("The answer is 3.43", 0), ("The answer is 3.43", 0)),
    (f"{A}{DEV[0]}", "", (None, 0), OUT, OUT),
    (f"{A}{DEV[1]}", "C", ("C", 1), ("C", 1), ("C", 1)),
    (f"{A}{DEV[2]}", "Transformation", ("Transformation", 1), ("Transformation", 1), ("Transformation", 1)),
    (f"{C}{MATH}", "K", ("K", 1), ("K", 1), ("K", 1)),
    (f"{C}{MEDICINE}", "I choose option B.", ("B", 1), ("B", 1), ("I", 0)),
    (f"{P}{MATH}", "Not (A); it is (C)", ("C", 1), ("C", 1), ("C", 1)),
    (f"{P}{MEDICINE}", "", (None, 0), OUT, (None, 0)),
    (f"{P}{ART}", "A: no. The answer is B.", ("B", 1), ("A", 0), ("A", 0)),
    (f"{A}{MATH}{ALONE}", "A", ("A", 0), ("A", 0), ("A", 0)),
    (f"{A}{MEDICINE}{ALONE}", "7", ("7", 0), ("7", 0), ("7", 0)),
    (f"{A}{DEV[1]}{ALONE}", "C", ("C", 1), ("C", 1), ("C", 1)),
]
TRACKS, OVERALL = "mean of tracks", "mean over questions"
WITHOUT, GAIN = "adaptation without the lecture", "knowledge gain"
SCORES = [
    # Adaptation 1, 0, 0, 0, 1, 1; comprehension 1, 1; perception 1, 0, 1: (1/2 + 1 + 2/3) / 3, and 7/11.
    # Without the lecture 1/3: (1/2 - 1/3) / (1 - 1/3) = 1/4, in percent.
    Scores(
        "video_mmmu/official",
        "ours",
        "ours",
        13 / 18,
        {TRACKS: 13 / 18, OVERALL: 7 / 11, WITHOUT: 1 / 3, GAIN: 25},
        {"total": 11, "scored": 11, "unparsed": 3},
        {
            "track": {"Adaptation": (1 / 2, 6), "Comprehension": (1, 2), "Perception": (2 / 3, 3)},
            # Math: 1, 0, 1, 1; 1; 1.
            "subject": {"Art_Theory": (1 / 2, 2), "Basic_Medical_Science": (1 / 3, 3), "Math": (5 / 6, 6)},
        },
    ),
    # Adaptation 1, 1, 0, out, 1, 1; comprehension 1, 1; perception 1, out, 0: (4/5 + 1 + 1/2) / 3, and 7/9.
    # (4/5 - 1/3) / (2/3) = 7/10.
    Scores(
        "video_mmmu/official",
        "published",
        "video_mmmu/official",
        23 / 30,
        {TRACKS: 23 / 30, OVERALL: 7 / 9, WITHOUT: 1 / 3, GAIN: 70},
        {"total": 11, "scored": 9, "no_value": 2, "unparsed": 2, "left_out": 2},
        {"track": {"Adaptation": (4 / 5, 5), "Comprehension": (1, 2), "Perception": (1 / 2, 2)}},
    ),
    # An empty output to a choice is wrong: adaptation as before; comprehension 1, 0; perception 1, 0, 0.
    # (4/5 + 1/2 + 1/3) / 3 = 49/90, and 6/10.
    Scores(
        "video_mmmu/lmms",
        "published",
        "video_mmmu/lmms",
        49 / 90,
        {TRACKS: 49 / 90, OVERALL: 6 / 10, WITHOUT: 1 / 3, GAIN: 70},
        {"total": 11, "scored": 10, "no_value": 1, "unparsed": 2, "left_out": 1},
        {"track": {"Adaptation": (4 / 5, 5), "Comprehension": (1 / 2, 2), "Perception": (1 / 3, 3)}},
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("video_mmmu"), "video_mmmu", FILES)


def test_rows_become_records_once_more_where_the_picture_has_a_video(prepared: PreparedSet) -> None:
    assert set(prepared.samples) == {question for question, *_ in TABLE} and not prepared.refused
    alone = {name: one.media[0].path for name, one in prepared.samples.items() if name.endswith(ALONE)}
    assert alone == {f"{A}{name}{ALONE}": f"question_only/{name}_image.mp4" for name in (MATH, MEDICINE, DEV[1])}
    assert all(prepared.samples[name].details["question_only"] is True for name in alone)
    assert prepared.samples[f"{A}{MATH}"].details["question_only"] == f"question_only/{MATH}_image.mp4"
    kinds = {name: one.answer_kind for name, one in prepared.samples.items() if name.startswith(A)}
    assert (kinds[f"{A}{MEDICINE}"], kinds[f"{A}{ART}"], kinds[f"{A}{DEV[0]}"]) == ("numerical", "exact", "exact")
    assert kinds[f"{A}{DEV[1]}"] == "multiple_choice"
    assert [len(prepared.samples[f"{track}{MEDICINE}"].options) for track in (C, P)] == [10, 14]
    assert prepared.samples[f"{P}{ART}"].options == ("A. red", "B. blue")


LEARN = "You should watch and learn the video content. Then apply what you learned to answer the following "
SHOWN = " question. The image for this question is at the end of the video.\n"
CHOICES = "\nA. slope\nB. area\nC. mean\nD. sum"
LAST = "\nPlease ignore the Quiz question in last frame of the video."
REPLY = "\nAdd `Answer: {Your final answer}` at the end of your reply."


@pytest.mark.parametrize(("whose", "end", "alone"), [("official", "", "\n"), ("kit", REPLY, REPLY)])
def test_words_are_those_published(prepared: PreparedSet, whose: str, end: str, alone: str) -> None:
    """``alone``: behind a question without options and without the lecture, where lmms-eval leaves a line's end."""
    asked = prepared.prompts(f"video_mmmu/{whose}")
    words = {name: line["user"] for name, line in asked.items()}
    assert words[f"{A}{MATH}"] == f"{LEARN}multi-choice{SHOWN}Which graph is it? <image 1>{CHOICES}{end}"
    assert words[f"{A}{MEDICINE}"] == f"{LEARN}open-ended{SHOWN}How much is it in <image 1>?{end}"
    assert words[f"{P}{MATH}"] == f"What is drawn at the end?{CHOICES}{LAST}{end}"
    assert words[f"{C}{MATH}"].startswith("Which step is it?\nA. step 1\n") and words[f"{C}{MATH}"].endswith(LAST + end)
    assert "\nK. step 11\n" in words[f"{C}{MATH}"]
    # Without the lecture there is nothing to learn from, and the picture is all there is.
    assert words[f"{A}{MATH}{ALONE}"] == f"Which graph is it? <image 1>{CHOICES}{end}"
    assert words[f"{A}{MEDICINE}{ALONE}"] == f"How much is it in <image 1>?{alone}"


def test_the_last_frame_is_shown(prepared: PreparedSet) -> None:
    """It alone has the picture: of the 800 frames of 400 s 768 are shown, and 32 by lmms-eval's rule."""
    for protocol, frames in (("official", 768), ("lmms", 32)):
        asked = prepared.prompts(f"video_mmmu/{protocol}")
        seconds = asked[f"{A}{MATH}"]["media"][0]["frame_seconds"]
        assert (len(seconds), seconds[0], seconds[-1]) == (frames, 0, 399.5)
    alone = prepared.prompts("video_mmmu/official")[f"{A}{MATH}{ALONE}"]["media"][0]
    assert alone["frame_seconds"] == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize("place", range(3), ids=["ours", "official", "lmms"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])


def test_a_gain_that_nobody_answered_for_is_said(prepared: PreparedSet) -> None:
    """Outputs to the three tracks alone."""
    table = [(question, None if question.endswith(ALONE) else output, "?") for question, output, *_ in TABLE]
    result, _ = prepared.score(table, 0, "video_mmmu/official", "ours")
    assert result["accuracy"] == pytest.approx(13 / 18) and result["figures"][GAIN]["value"] is None
    assert any("The knowledge gain has no value" in note for note in result["notes"])
    assert any("3 of 14 questions have no output" in note for note in result["notes"])

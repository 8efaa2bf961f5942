"""VSI-Bench the whole way: Parquet, videos by source and scene; choices and numbers; both aggregations, both MRAs.

Mean relative accuracy is the share of the ten thresholds t = .50, .55, ..., .95 with |p - g| / |g| below 1 - t: the
paper, our reader and Video-R1 have "<", the authors' code has "<=". 5 for 4 is off by .25, so it passes .5, .45, .4,
.35, .3 and, with "<=", .25 as well.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scored_sets import PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

ROOM, FLAT = {"dataset": "arkitscenes", "scene_name": "41069025"}, {"dataset": "scannet", "scene_name": "scene0011_00"}
COUNT, DISTANCE = "object_counting", "object_abs_distance"
SIZE, AREA = "object_size_estimation", "room_size_estimation"
NEAR, ORDER, ROUTE = "object_rel_distance", "obj_appearance_order", "route_planning"
EASY, MEDIUM = "object_rel_direction_easy", "object_rel_direction_medium"
OPTIONS = ["A. left", "B. right", "C. back"]


def row(number: int, kind: str, gold: str, options: list[str] | None = None, **scene: str) -> dict[str, Any]:
    found = {"id": number, **(scene or ROOM), "question_type": kind, "question": f"What of {kind} {number}?"}
    return found | {"ground_truth": gold, "options": options}


FILES = {
    "test-00000-of-00001.parquet": [
        row(0, COUNT, "4"),
        row(1, COUNT, "4") | {"question": "How many chair(s) are in this room?"},
        row(2, DISTANCE, "10"),
        row(3, SIZE, "20"),
        row(4, AREA, "20"),
        row(5, NEAR, "B", OPTIONS),
        row(6, ORDER, "A", OPTIONS),
        row(7, ROUTE, "C", OPTIONS, **FLAT),
        row(8, EASY, "A", OPTIONS, **FLAT),
        row(9, EASY, "B", OPTIONS, **FLAT),
        row(10, MEDIUM, "B", OPTIONS, **FLAT),
        row(11, COUNT, "0"),
    ],
    "arkitscenes/41069025.mp4": mp4(1, seconds=10),
    "scannet/scene0011_00.mp4": mp4(2, seconds=20),
}
# Question, output, what ours, the authors' rule (the text before the first blank) and Video-R1's (the whole text in the
# tags, or the whole output) say.
TABLE = [
    ("0", "5", ("5", 0.5), ("5", 0.6), ("5", 0.5)),
    ("1", "There are 2 chairs in the room.", ("2", 0), (None, 0), (None, 0)),
    ("2", "<answer>5</answer>", ("5", 0), (None, 0), ("5", 0)),
    # Off by .075: all thresholds but the last, .05.
    ("3", "21.5", ("21.5", 0.9), ("21.5", 0.9), ("21.5", 0.9)),
    # Off by .5, the first threshold itself.
    ("4", "10", ("10", 0), ("10", 0.1), ("10", 0)),
    ("5", "B.", ("B", 1), ("B", 1), (None, 0)),
    ("6", "(A)", ("A", 1), (None, 0), (None, 0)),
    ("7", "<answer>C</answer>", ("C", 1), (None, 0), ("C", 1)),
    ("8", "A", ("A", 1), ("A", 1), ("A", 1)),
    ("9", "A", ("A", 0), ("A", 0), ("A", 0)),
    ("10", "b", ("B", 1), ("B", 1), (None, 0)),
]
TASKS, OVERALL = "mean of tasks", "mean over questions"
HARD = "No question of object_rel_direction_hard could be scored."
LEVELS = "Relative direction is the mean of 2 of its 3 levels."
SCORES = [
    # Counting (.5 + 0) / 2, direction (1/2 + 1) / 2, the other six 0, .9, 0, 1, 1, 1: 4.9 / 8. Questions: 6.4 / 11.
    Scores(
        "vsi_bench/official",
        "ours",
        "ours",
        4.9 / 8,
        {TASKS: 4.9 / 8, OVERALL: 6.4 / 11},
        {"total": 11, "scored": 11},
        {
            "task": {
                COUNT: (0.25, 2),
                DISTANCE: (0, 1),
                SIZE: (0.9, 1),
                AREA: (0, 1),
                NEAR: (1, 1),
                ORDER: (1, 1),
                ROUTE: (1, 1),
                "object_rel_direction": (0.75, 3),
            },
            "question_type": {
                COUNT: (0.25, 2),
                DISTANCE: (0, 1),
                SIZE: (0.9, 1),
                AREA: (0, 1),
                NEAR: (1, 1),
                ORDER: (1, 1),
                ROUTE: (1, 1),
                EASY: (0.5, 2),
                MEDIUM: (1, 1),
            },
        },
        [HARD, LEVELS],
    ),
    # Counting (.6 + 0) / 2, direction .75, the others 0, .9, .1, 1, 0, 0: 3.05 / 8. Questions: 4.6 / 11.
    Scores(
        "vsi_bench/official",
        "published",
        "vsi_bench/official",
        3.05 / 8,
        {TASKS: 3.05 / 8, OVERALL: 4.6 / 11},
        {"total": 11, "scored": 11, "unparsed": 4},
        notes=[HARD, LEVELS],
    ),
    # Choices 0, 0, 1, 1, 0, 0: 1/3. Numbers .5, 0, 0, .9, 0: .28.
    Scores(
        "vsi_bench/video_r1",
        "published",
        "vsi_bench/video_r1",
        (1 / 3 + 0.28) / 2,
        {"(choice + numerical) / 2": (1 / 3 + 0.28) / 2, "choice": 1 / 3, "numerical": 0.28},
        {"total": 11, "scored": 11, "unparsed": 4},
        notes=[HARD],
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("vsi_bench"), "vsi", FILES)


def test_rows_become_records_but_for_a_number_that_nothing_is_relative_to(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [question for question, *_ in TABLE]
    assert prepared.refused == {"11": "unscorable_gold_answer"}
    kinds = {name: one.answer_kind for name, one in prepared.samples.items()}
    assert kinds == {str(n): "mean_relative_accuracy" if n < 5 else "multiple_choice" for n in range(11)}


CHOICES = "A. left\nB. right\nC. back"


@pytest.mark.parametrize(
    ("whose", "number", "choice"),
    [
        (
            "official",
            "Please answer the question using a single word or phrase.",
            f"Options:\n{CHOICES}\nAnswer with the option's letter from the given choices directly.",
        ),
        (
            "official_api",
            "Do not response anything other than a single number!",
            f"Options:\n{CHOICES}\nAnswer with the option's letter from the given choices directly.",
        ),
        (
            "kit",
            "Answer briefly and directly in one float number.",
            f"{CHOICES}\nAnswer with the option's letter from the given choices directly.",
        ),
    ],
)
def test_words_are_those_published(prepared: PreparedSet, whose: str, number: str, choice: str) -> None:
    asked = prepared.prompts(f"vsi_bench/{whose}")
    assert asked["0"]["user"] == f"These are frames of a video.\nWhat of {COUNT} 0?\n{number}"
    assert asked["7"]["user"] == f"These are frames of a video.\nWhat of {ROUTE} 7?\n{choice}"
    assert asked["0"]["media"][0]["frame_seconds"] == [place / 2 for place in range(20)]
    assert asked["7"]["media"][0]["path"] == "scannet/scene0011_00.mp4"


def test_video_r1_shows_16_frames_and_asks_for_tags(prepared: PreparedSet) -> None:
    """20 frames at two a second, of which 16: 19 / 15 apart."""
    asked = prepared.prompts("vsi_bench/video_r1")
    seconds = asked["0"]["media"][0]["frame_seconds"]
    # 0, 1.27, 2.53, 3.8, 5.07, 6.33, 7.6, 8.87, 10.13, ... rounded.
    assert seconds[:9] == [0, 0.5, 1.5, 2, 2.5, 3, 4, 4.5, 5] and seconds[-1] == 9.5 and len(seconds) == 16
    assert asked["0"]["user"].endswith(
        "Please provide the numerical value (e.g., 42 or 3.14) within the <answer> </answer> tags."
    )
    assert asked["7"]["user"].startswith(f"What of {ROUTE} 7?Options:\n{CHOICES}\n\nPlease think about this question")
    sampling = asked["0"]["settings"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (0.1, 0.001)


@pytest.mark.parametrize("place", range(3), ids=["ours", "official", "video_r1"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, TABLE, place, SCORES[place])


def test_the_authors_rule_under_the_other_aggregation(prepared: PreparedSet, tmp_path: Any) -> None:
    """Choices 1, 0, 0, 1, 0, 1: 1/2. Numbers .6, 0, 0, .9, .1: .32. A protocol of one's own says which."""
    own = tmp_path / "own.yaml"
    own.write_text("base: vsi_bench/official\nsource: made up\naggregation: vsi_bench/video_r1\n")
    figures = {"(choice + numerical) / 2": 0.41, "choice": 0.5, "numerical": 0.32}
    counts = {"total": 11, "scored": 11, "unparsed": 4}
    check_scores(
        prepared, TABLE, 1, Scores(str(own), "published", "vsi_bench/official", 0.41, figures, counts, notes=[HARD])
    )

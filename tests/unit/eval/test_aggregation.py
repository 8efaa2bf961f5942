"""Each set's figures, worked out by hand on small sets."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.eval.questions import output, question
from vlm_pg.errors import VlmPgError
from vlm_pg.eval.aggregation import AGGREGATIONS, aggregate
from vlm_pg.eval.contracts import Answered


def scored(scores: Sequence[float], prefix: str, clusters: Sequence[str] = (), **details: Any) -> list[Answered]:
    """A question for each score, with the same details."""
    return [
        question(f"{prefix}{index}", score, cluster=clusters[index] if clusters else "", details=details)
        for index, score in enumerate(scores)
    ]


def test_mvbench_tasks_of_unequal_size_count_alike() -> None:
    """Tasks x (1, 1, 1, 0) and y (0): (3/4 + 0) / 2 = 3/8, where the mean over questions is 3/5.

    A task of one video leaves the error unknown. x: 1, 0 (variance of its mean 1/4); y: 1, 1, 0 (mean 2/3, variance
    (1/3) / 3 = 1/9): stratified error sqrt(1/4 + 1/9) / 2.
    """
    figures = aggregate("mvbench", [*scored([1, 1, 1, 0], "x", task="x"), *scored([0], "y", task="y")])
    assert figures.headline.value == 0.375
    assert figures.figures["mean over questions"].value == 0.6
    assert figures.notes == ("The set has 20 tasks, and questions of 2 are here.",)
    assert figures.headline.standard_error is None
    headline = aggregate("mvbench", [*scored([1, 0], "x", task="x"), *scored([1, 1, 0], "y", task="y")]).headline
    assert headline.standard_error == pytest.approx(math.sqrt(1 / 4 + 1 / 9) / 2)
    assert headline.n == headline.clusters == 5


def test_a_video_with_questions_in_two_tasks_brings_their_covariance() -> None:
    """Both tasks ask of v (right) and w (wrong): their means move together, and the error is that of one, 1/2."""
    shared = [*scored([1, 0], "x", ("v", "w"), task="x"), *scored([1, 0], "y", ("v", "w"), task="y")]
    assert aggregate("mvbench", shared).headline.standard_error == pytest.approx(0.5)
    apart = [*scored([1, 0], "x", ("v", "w"), task="x"), *scored([1, 0], "y", ("t", "u"), task="y")]
    assert aggregate("mvbench", apart).headline.standard_error == pytest.approx(0.5 / math.sqrt(2))
    # What helps one task hurts the other: nothing moves their mean.
    opposed = [*scored([1, 0], "x", ("v", "w"), task="x"), *scored([0, 1], "y", ("v", "w"), task="y")]
    assert aggregate("mvbench", opposed).headline.standard_error == pytest.approx(0.0)


def test_a_task_without_a_score_is_named_and_not_a_zero() -> None:
    broken = question("y0", fault=("cannot_decode", "damaged"), details={"task": "y"})
    figures = aggregate("mvbench", [*scored([1, 0], "x", task="x"), broken])
    assert figures.headline.value == 0.5
    assert figures.notes[0] == "No question of y could be scored; the mean is over the other tasks."
    assert figures.groups["task"]["y"].value is None and figures.measures["n_bad_media"] == 1


def test_tempcompass_totals_and_tasks_by_dim_and_fine_dim() -> None:
    """multi-choice: 1, 0 and order's 0, which has no finer name; yes_no: 1, and 1 without a fine dimension.

    Mean of tasks (1/3 + 1) / 2 = 2/3, pooled 3/5.
    """
    figures = aggregate(
        "tempcompass",
        [
            *scored([1, 0], "a", task="multi-choice", dim="action", fine_dim="fine-grained action"),
            *scored([0], "b", task="multi-choice", dim="order"),
            *scored([1], "c", task="yes_no", dim="action", fine_dim="fine-grained action"),
            *scored([1], "d", task="yes_no", dim="speed"),
        ],
    )
    assert figures.main == "mean of tasks" and figures.headline.value == pytest.approx(2 / 3)
    assert figures.figures["mean over questions"].value == 0.6
    values = {key: {name: one.value for name, one in each.items()} for key, each in figures.groups.items()}
    assert values["task"]["multi-choice"] == pytest.approx(1 / 3)
    assert values["dim"] == {"action": pytest.approx(2 / 3), "order": 0.0, "speed": 1.0}
    assert values["dim of multi-choice"] == {"action": 0.5, "order": 0.0}
    fine = {"(not given)": 1.0, "fine-grained action": pytest.approx(2 / 3), "order": 0.0}
    assert values["fine_dim"] == fine
    assert values["fine_dim of multi-choice"] == {"fine-grained action": 0.5, "order": 0.0}
    assert values["fine_dim of yes_no"] == {"(not given)": 1.0, "fine-grained action": 1.0}


def test_figures_are_also_given_by_categories_and_those_that_nobody_has_are_named() -> None:
    answered = [*scored([1, 0], "a", part="x"), *scored([0], "b", part="y")]
    figures = aggregate("mean", answered, categories=("part", "prt"))
    assert {name: one.value for name, one in figures.groups["part"].items()} == {"x": 0.5, "y": 0.0}
    assert list(figures.groups) == ["part"]
    assert figures.notes == ("There are no figures by prt, which no question has in its details.",)
    # Those that a set groups by itself stay as they are: TP is TN there.
    figures = aggregate("nextqa", scored([1, 0], "a", type="TP"), categories=("type",))
    assert list(figures.groups["type"]) == ["TN"] and not figures.notes


OTHER_TASKS = [
    "object_counting",
    "object_abs_distance",
    "object_size_estimation",
    "room_size_estimation",
    "object_rel_distance",
    "route_planning",
    "obj_appearance_order",
]


def of_type(name: str, *scores: float) -> list[Answered]:
    return scored(scores, name, question_type=name)


def vsi(*directions: list[Answered]) -> list[Answered]:
    """The seven other tasks at 1/2 each, and these."""
    others = [one for name in OTHER_TASKS for one in of_type(name, 1.0, 0.0)]
    return [*others, *(one for each in directions for one in each)]


def test_vsi_bench_averages_the_three_directions_first() -> None:
    """Directions 1, 1/2, 0: their mean 1/2, however many questions; so all eight tasks are at 1/2."""
    easy, medium, hard = (f"object_rel_direction_{level}" for level in ("easy", "medium", "hard"))
    figures = aggregate("vsi_bench/official", vsi(of_type(easy, 1, 1, 1, 1), of_type(medium, 1, 0), of_type(hard, 0)))
    assert figures.headline.value == pytest.approx(0.5)
    # Pooled: 7 + 5 of 14 + 7.
    assert figures.figures["mean over questions"].value == pytest.approx(12 / 21)
    assert figures.groups["task"]["object_rel_direction"].value == pytest.approx(0.5)
    assert len(figures.groups["task"]) == 8 and len(figures.groups["question_type"]) == 10
    assert figures.notes == ()


def test_vsi_bench_states_missing_levels_and_tasks() -> None:
    """Easy 1 and medium 0 alone: (7 * 1/2 + 1/2) / 8 = 1/2; without any direction 7 * 1/2 / 7."""
    levels = of_type("object_rel_direction_easy", 1), of_type("object_rel_direction_medium", 0)
    figures = aggregate("vsi_bench/official", vsi(*levels))
    assert figures.headline.value == pytest.approx(0.5)
    assert figures.notes == (
        "No question of object_rel_direction_hard could be scored.",
        "Relative direction is the mean of 2 of its 3 levels.",
    )
    figures = aggregate("vsi_bench/official", vsi())
    assert figures.headline.value == pytest.approx(0.5)
    assert figures.notes[-1] == "The mean is over 7 of the 8 tasks."


def test_vsi_bench_as_video_r1_publishes_it() -> None:
    """Choice 1, 0, 0 (pooled 1/3), numbers 0.5, 0.7, 0.9 (0.7): (1/3 + 0.7) / 2 = 0.516667."""
    questions = [
        *of_type("object_rel_distance", 1, 0),
        *of_type("object_rel_direction_hard", 0),
        *of_type("object_counting", 0.5, 0.7),
        *of_type("room_size_estimation", 0.9),
    ]
    figures = aggregate("vsi_bench/video_r1", questions)
    assert figures.headline.value == pytest.approx(0.5166667, abs=1e-7)
    assert figures.figures["choice"].value == pytest.approx(1 / 3)
    assert figures.figures["numerical"].value == pytest.approx(0.7)
    choice_alone = aggregate("vsi_bench/video_r1", of_type("object_rel_distance", 1, 0))
    assert choice_alone.headline.value is None and choice_alone.figures["choice"].value == 0.5
    assert choice_alone.notes[-1].endswith("it takes scored questions of both kinds.")


def test_video_mmmu_tracks_count_alike() -> None:
    """Perception 1; comprehension 1/2; adaptation 0, 0, 1 (1/3): mean 11/18; pooled 3/6."""
    questions = [
        *scored([1], "p", track="Perception", subject="Art"),
        *scored([1, 0], "c", track="Comprehension", subject="Art"),
        *scored([0, 0, 1], "a", track="Adaptation", subject="Music"),
    ]
    figures = aggregate("video_mmmu", questions)
    assert figures.headline.value == pytest.approx(11 / 18)
    assert figures.figures["mean over questions"].value == 0.5
    assert "knowledge gain" not in figures.figures
    assert figures.groups["subject"]["Art"].n == 3


def test_video_mmmu_knowledge_gain() -> None:
    """Adaptation 3/4 with the lecture, 1/2 without: (3/4 - 1/2) / (1 - 1/2) = 50 %.

    Its error: slopes 1 / (1/2) = 2 and (3/4 - 1) / (1/2)^2 = -1; variances of the means (3/4 * 1/4) / 3 = 1/16 and
    (1/2 * 1/2) / 3 = 1/12 with videos of their own: 100 * sqrt(4 / 16 + 1 / 12) = 57.735.
    """
    after = scored([1, 1, 1, 0], "a", track="Adaptation")
    before = scored([1, 1, 0, 0], "b", track="Adaptation", question_only=True)
    figures = aggregate("video_mmmu", [*after, *before])
    gain = figures.figures["knowledge gain"]
    assert gain.value == pytest.approx(50.0) and gain.unit == "percent"
    assert gain.standard_error == pytest.approx(57.735, abs=1e-3)
    assert figures.figures["adaptation without the lecture"].value == 0.5
    # What was asked without the lecture is in no other figure.
    assert figures.headline.value == 0.75 and figures.measures["n_total"] == 4
    # All right without: nothing is left to gain. And one question with and without its lecture is no duplicate.
    same = [question("a", 1.0, details={"track": "Adaptation", "question_only": only}) for only in (False, True)]
    figures = aggregate("video_mmmu", same)
    assert figures.figures["knowledge gain"].value is None
    assert figures.notes[-1].startswith("The knowledge gain has no value")


def test_mmvu_choice_open_and_groups() -> None:
    questions = [
        *scored([1, 0], "a", question_type="multiple-choice", subject="Modern_Physics"),
        *scored([1], "b", question_type="open-ended", subject="Chemistry"),
        *scored([0], "c", question_type="open-ended", subject="Law"),
    ]
    figures = aggregate("mmvu", questions)
    assert figures.headline.value == 0.5
    assert figures.figures["multiple choice"].value == 0.5 and figures.figures["open-ended"].value == 0.5
    assert {name: (one.value, one.n) for name, one in figures.groups["group"].items()} == {
        "Humanities & Social Science": (0.0, 1),
        "Science": (pytest.approx(2 / 3), 3),
    }


def test_groups_are_in_order_of_numbers_and_a_question_is_in_each_of_its_own() -> None:
    """LongVideoBench's lengths; MathVista's skills, of which a question may have several or none."""
    lengths = [one for length in (3600, 15, 600, 60) for one in scored([1], str(length), duration_group=length)]
    assert list(aggregate("longvideobench", lengths).groups["duration_group"]) == ["15", "60", "600", "3600"]
    both, one = scored([1], "a", skills=["algebra", "geometry"]), scored([0], "b", skills=["algebra"])
    figures = aggregate("mathvista", [*both, *one, *scored([0], "c")])
    skills = {"(not given)": (0.0, 1), "algebra": (0.5, 2), "geometry": (1.0, 1)}
    assert {name: (each.value, each.n) for name, each in figures.groups["skills"].items()} == skills
    assert figures.headline.n == 3


def test_nextqa_types_and_kinds() -> None:
    """TP counts as TN: TN has 1, 0; temporal has them and TC's 0."""
    types = (("CW", 1), ("CH", 0), ("TN", 1), ("TP", 0), ("TC", 0), ("DO", 1))
    figures = aggregate("nextqa", [one for name, score in types for one in scored([score], name, type=name)])
    assert figures.groups["type"]["TN"].value == 0.5 and "TP" not in figures.groups["type"]
    assert {name: one.value for name, one in figures.groups["kind"].items()} == {
        "C": 0.5,
        "D": 1.0,
        "T": pytest.approx(1 / 3),
    }


def test_charades_in_percent() -> None:
    """IoU 0.6 and 0.3 of one query, 0.7 of another: mIoU (0.45 + 0.7) / 2; R@.3 all; R@.5 (1/2 + 1) / 2; R@.7 1/2."""
    figures = aggregate("charades_sta", [question("a", 0.6, 0.3), question("b", 0.7)])
    values = {name: one.value for name, one in figures.figures.items()}
    assert values == {"mIoU": pytest.approx(57.5), "R@1 IoU>=0.3": 100.0, "R@1 IoU>=0.5": 75.0, "R@1 IoU>=0.7": 50.0}
    # sqrt(2 * 2 * 12.5^2) / 2
    assert figures.headline.unit == "percent" and figures.headline.standard_error == pytest.approx(12.5)
    row = figures.to_row()
    assert row["accuracy"] == pytest.approx(0.575) and row["standard_error"] == pytest.approx(0.125)


def test_mathematics_by_mean_vote_and_pass() -> None:
    """a: 1, 1, 0 with the wrong one alone: 2/3, vote 1, pass 1. b: three unlike answers, one right: all 1/3, pass 1."""
    first = question("a", output(1.0, "7"), output(1.0, "7"), output(0.0, "8"), details={"level": "Level 1"})
    second = question("b", output(1.0, "1"), output(0.0, "2"), output(0.0, "3"), details={"level": "Level 2"})
    figures = aggregate("math", [first, second])
    values = {name: one.value for name, one in figures.figures.items()}
    assert values == {"mean@3": pytest.approx(0.5), "majority@3": pytest.approx(2 / 3), "pass@3": pytest.approx(1.0)}
    assert figures.groups["level"]["Level 2"].value == pytest.approx(1 / 3) and "subject" not in figures.groups
    figures = aggregate("math", [question("a", 1.0, 1.0, 0.0), question("b", 0.0)])
    assert figures.main == "mean@1" and figures.headline.value == pytest.approx(1 / 3)
    assert figures.notes == ("Problems have 1 to 3 outputs; the mean takes all of them, votes take 1.",)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_to_aggregate_gives_no_figure_and_no_crash(name: str) -> None:
    row = aggregate(name, []).to_row()
    assert row["accuracy"] is None and row["n"] == 0
    json.dumps(row, allow_nan=False)


def test_rows_of_figures_have_what_reports_read() -> None:
    row = aggregate("mvbench", [*scored([1, 1, 0], "x", task="x"), *scored([0, 0], "y", task="y")]).to_row()
    assert row["accuracy"] == pytest.approx(1 / 3) and row["main"] == "mean of tasks" and row["n"] == 5
    assert row["rule"] == "mean of the means of the 20 tasks" and row["pass_at_k"] == {"1": 0.4}
    # x has 2/3 with error 1/3; y 0 with error 0: 1/3 with error 1/6, 4 degrees: t = 2.776445; at least 0.
    figure = row["figures"]["mean of tasks"]
    assert figure["interval_95"] == [0.0, pytest.approx(1 / 3 + 2.776445 / 6)]
    assert figure["unit"] == "fraction" and figure["clusters"] == 5


@pytest.mark.parametrize(
    ("name", "answered", "message"),
    [
        ("vsi_bench/official", of_type("colour", 1), "VSI-Bench has no question type 'colour'"),
        ("mmvu", scored([1], "d", question_type="open-ended", subject="Alchemy"), "MMVU has no subject 'Alchemy'"),
        (
            "mvbench",
            scored([1], "a", dim="action"),
            r"Question 'a0' has no 'task' in its details \(dim\).*vlm-pg prepare",
        ),
        ("mean", [question("a", 1.0), question("a", 0.0)], "Question 'a' is there twice"),
        ("mv_bench", [], r"Did you mean 'mvbench'.*There are: mean, video_mme.*path/to/file.py:function"),
    ],
)
def test_what_cannot_be_aggregated(name: str, answered: list[Answered], message: str) -> None:
    with pytest.raises(VlmPgError, match=message):
        aggregate(name, answered)

"""Measures of a set of answers, by hand and against trying every choice of outputs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import numpy as np
import pytest

from tests.unit.eval.questions import output, question
from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.measures import (
    counts_of,
    figure_of,
    ks_of,
    majority_at_k,
    mean_of,
    mean_of_estimates,
    question_pass_at_k,
    t_quantile,
)
from vlm_pg.eval.tables import estimates_of, shown


def majority_by_trying(answers: list[str | None], scores: list[float], k: int) -> float:
    means = {
        name: sum(score for answer, score in zip(answers, scores, strict=True) if answer == name) / answers.count(name)
        for name in answers
    }
    results = []
    for chosen in combinations(answers, k):
        votes = Counter(answer for answer in chosen if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        results.append(sum(means[answer] for answer in winners) / len(winners) if winners else 0.0)
    return sum(results) / len(results)


def test_majority_equals_the_mean_over_every_choice_of_outputs() -> None:
    """Answers of None have no vote; a reader may also give equal answers different scores."""
    random = Random(1)
    for _ in range(200):
        answers = [random.choice(["A", "B", "C", "D", None]) for _ in range(random.randint(1, 8))]
        of_answer = {name: random.random() for name in ("A", "B", "C", "D", None)}
        scores = [of_answer[answer] if random.random() < 0.8 else random.random() for answer in answers]
        for k in range(1, len(answers) + 1):
            assert majority_at_k(answers, scores, k) == pytest.approx(majority_by_trying(answers, scores, k), abs=1e-12)


def test_majority_of_64_outputs_without_trying() -> None:
    answers = [str(number) for number in range(10) for _ in range(number + 1)] + ["9"] * 9
    scores = [float(answer == "9") for answer in answers]
    assert len(answers) == 64
    assert majority_at_k(answers, scores, 64) == 1.0
    assert majority_at_k(answers, scores, 1) == pytest.approx(19 / 64)


def test_pass_at_k_equals_the_share_of_choices_with_a_right_one() -> None:
    random = Random(2)
    for _ in range(100):
        scores = [random.choice([0.0, 0.5, 1.0]) for _ in range(random.randint(1, 8))]
        for k in range(1, len(scores) + 1):
            chosen = [max(each) == 1.0 for each in combinations(scores, k)]
            assert question_pass_at_k(question("a", *scores), k) == pytest.approx(sum(chosen) / len(chosen))
    assert question_pass_at_k(question("a", 1.0), 2) is None


def test_k_goes_by_powers_of_two_to_the_fewest_outputs() -> None:
    assert ks_of([question("a", *[1.0] * 6), question("b", *[0.0] * 8)]) == [1, 2, 4, 6]
    assert ks_of([]) == []


def test_standard_error_by_hand() -> None:
    """Videos v (1, 1, 0), w (0, 1), u (0): mean 1/2, sums of deviations 1/2, 0, -1/2.

    sqrt(3/2 * (1/4 + 1/4)) / 6 = 0.144338.
    """
    values = [("v", 1.0), ("w", 0.0), ("v", 1.0), ("u", 0.0), ("v", 0.0), ("w", 1.0)]
    estimate = mean_of(values)
    assert estimate is not None and estimate.standard_error == pytest.approx(0.1443376, abs=1e-7)


def test_no_error_or_interval_where_the_spread_is_unknown() -> None:
    """One video has no standard error; equal scores have one of 0, which claims no certainty."""
    one_video = figure_of([question("a", 1.0, cluster="v"), question("b", 0.0, cluster="v")])
    assert (one_video.value, one_video.standard_error, one_video.interval) == (0.5, None, None)
    equal = figure_of([question("a", 1.0), question("b", 1.0)])
    assert (equal.value, equal.standard_error, equal.interval) == (1.0, 0.0, None)


def test_no_interval_goes_beyond_what_is_possible() -> None:
    """Scores in 0 to 1, of which a mean of groups and percent are made too; other values have no limits."""
    few = [question("a", 1.0), question("b", 0.0)]
    assert figure_of(few).interval == (0.0, 1.0)
    assert figure_of(few, unit="percent").interval == (0.0, 100.0)
    groups = estimates_of({"x": few, "y": [question("c", 1.0), question("d", 1.0)]})
    assert shown(mean_of_estimates(list(groups.values()))).interval == (0.0, 1.0)
    gain = figure_of(few, lambda one: 2 * one.score - 1 if one.score is not None else None).interval
    assert gain == (pytest.approx(-12.70620, abs=1e-4), pytest.approx(12.70620, abs=1e-4))


def test_quantiles_are_those_of_the_tables() -> None:
    """Tables of Student's t, two-sided 95 %."""
    tables = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 10: 2.2281, 39: 2.0227, 120: 1.9799}
    assert {degrees: t_quantile(degrees) for degrees in tables} == pytest.approx(tables, abs=5e-5)


def test_intervals_hold_the_truth_in_95_of_100_sets() -> None:
    """2,000 sets of 40 videos with 1 to 5 questions, whose difficulty is the video's own: 93 to 97 % must hold it."""
    random = np.random.default_rng(7)
    truth = 2.0 / 3.5
    held = 0
    for _ in range(2000):
        sizes = random.integers(1, 6, size=40)
        ease = np.repeat(random.beta(2.0, 1.5, size=40), sizes)
        videos = np.repeat(np.arange(40), sizes)
        right = random.random(len(ease)) < ease
        estimate = mean_of([(str(video), float(value)) for video, value in zip(videos, right, strict=True)])
        assert estimate is not None
        interval = estimate.figure().interval
        assert interval is not None
        held += interval[0] <= truth <= interval[1]
    assert 0.93 <= held / 2000 <= 0.97


def test_what_is_missing_is_counted_by_cause() -> None:
    answered = [
        question("a", output(1.0, num_tokens=10), output(0.0, None, finish_reason="length", num_tokens=30)),
        question("b", fault=("cannot_decode", "damaged")),
        question("c", fault=("no_output", "none was given")),
        question("d", output(None)),
        question("e", output(1.0), output(0.0, None, counts=False)),
        question("f", output(0.0, None, counts=False)),
    ]
    questions = {"n_total": 6, "n_scored": 2, "n_bad_media": 1, "n_no_output": 1, "n_no_value": 2}
    outputs = {"n_outputs": 6, "n_unparsed": 3, "n_truncated": 1, "n_left_out": 2}
    assert counts_of(answered) == questions | outputs
    assert counts_of([question("a")])["n_no_output"] == 1
    # a: (1 + 0) / 2; e: its second output does not count: 1.
    row = aggregate("mean", answered).to_row()
    assert row["accuracy"] == 0.75 and row["n"] == 2
    assert row["mean_tokens"] == 20.0 and row["chance"] == 0.5
    assert row["unparsed_share"] == 0.5 and row["truncated_share"] == pytest.approx(1 / 6)


def test_what_does_not_count_is_in_no_vote_and_no_pass() -> None:
    """A wrong B, and two right outputs of which one is left out: of the pair that counts A and B share the vote."""
    left_out = output(1.0, "A", counts=False)
    row = aggregate("mean", [question("a", output(1.0, "A"), output(0.0, "B"), left_out)]).to_row()
    assert row["pass_at_k"] == {"1": 0.5, "2": 1.0, "3": None}
    assert row["majority_at_k"] == {"1": 0.5, "2": 0.5, "3": None}


def test_measures_of_two_categories() -> None:
    first = question("a", output(1.0, "A"), output(1.0, "A"), output(0.0, "B"), category="x")
    second = question("b", *[output(0.0, "B")] * 3, category="y", options=(), kind="numerical")
    row = aggregate("mean", [first, second], formats=[1.0, 0.0, None]).to_row()
    assert row["accuracy"] == pytest.approx(1 / 3) and row["n"] == row["n_total"] == row["clusters"] == 2
    assert row["standard_error"] == pytest.approx(1 / 3)
    assert row["by_category"]["x"]["accuracy"] == pytest.approx(2 / 3) and row["by_category"]["y"]["n"] == 1
    # Of a: 2/3, then 1 (no pair without an A), 1; of b: 0.
    assert row["pass_at_k"] == {"1": pytest.approx(1 / 3), "2": 0.5, "3": 0.5}
    assert row["majority_at_k"] == {"1": pytest.approx(1 / 3), "2": pytest.approx(1 / 3), "3": 0.5}
    assert row["format_rate"] == 0.5 and row["chance"] is None


def test_nothing_has_no_figures() -> None:
    row = aggregate("mean", []).to_row()
    assert row["accuracy"] is None and row["standard_error"] is None and row["n"] == 0 and row["unparsed_share"] is None
    assert row["pass_at_k"] == {} and row["by_category"] == {} and row["chance"] is None

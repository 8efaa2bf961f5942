"""Paired comparisons of two runs by hand, and the console lines of figures and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import eval_results as results
from tests.unit.eval.questions import output, question
from vlm_pg.errors import VlmPgError
from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.figure_lines import compare, comparison_lines, table


def test_paired_difference_by_hand() -> None:
    """Differences 1 (v), 0 (v), 1 (w), 0 (u), -1 (u): mean 1/5, sums of deviations 3/5, 4/5, -7/5.

    Error sqrt(3/2 * (9 + 16 + 49) / 25) / 5 = 0.421426; t of 2 degrees 4.302653: 0.2 -+ 1.813251, of -1 to 1.
    """
    clusters = {"a": "v", "b": "v", "c": "w", "d": "u", "e": "u"}
    before = {"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": 1.0}
    after = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0, "e": 0.0}
    result = compare(*([question(name, run[name], cluster=clusters[name]) for name in run] for run in (before, after)))
    assert result.difference.value == pytest.approx(0.2) and result.difference.clusters == 3
    assert result.difference.standard_error == pytest.approx(math.sqrt(1.5 * 74 / 25) / 5)
    assert result.difference.interval == (-1.0, 1.0)
    assert (result.first, result.second) == (pytest.approx(0.4), pytest.approx(0.6))
    assert (result.n_better, result.n_worse) == (2, 1)
    # 16 videos like v, w and u of them each: error 0.421426 * sqrt(2/3 * 48/47) / 4, t of 47 degrees 2.011741.
    many = [(f"{name}{copy}", name, f"{clusters[name]}{copy}") for copy in range(16) for name in clusters]
    result = compare(*([question(i, run[name], cluster=video) for i, name, video in many] for run in (before, after)))
    reach = 2.011741 * 0.421426 * math.sqrt(2 / 3 * 48 / 47) / 4
    assert result.difference.interval == (pytest.approx(0.2 - reach, abs=1e-5), pytest.approx(0.2 + reach, abs=1e-5))


def test_questions_are_paired_by_id_and_only_those_with_two_scores_count() -> None:
    first = [question("a", 0.0), question("b", 1.0), question("only first", 1.0), question("e", fault=("bad", ""))]
    second = [question("x", 1.0), question("b", 1.0), question("a", 1.0), question("e", 1.0)]
    result = compare(first, second)
    assert result.difference.value == 0.5 and result.difference.n == 2


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([question("a", 1.0)], [question("b", 1.0)], r"share 0 questions.*'a'.*'b'.*runs on the same set"),
        ([question("a", 1.0)], [question("a", fault=("x", ""))], "share 1 questions, and none has a score in both"),
        (
            [question("a", 1.0), question("b", 1.0)],
            [question("a", 1.0), question("b", 1.0, gold="B")],
            r"1 of 2 shared ids are different questions.*'b'",
        ),
        ([question("a", 1.0)], [question("a", 1.0), question("a", 0.0)], "'a' is twice in the second run"),
    ],
)
def test_runs_that_cannot_be_compared(first: Sequence[Answered], second: Sequence[Answered], message: str) -> None:
    with pytest.raises(VlmPgError, match=message):
        compare(first, second)


def test_lines_of_comparisons(tmp_path: Path) -> None:
    """One better, one equal: 0.5 with error 0.5, t of 1 degree 12.7, cut to what is possible. Both better: none."""
    runs = {"wrong": (0.0, 0.0, "ours"), "half": (0.0, 1.0, "video_mme/lmms"), "right": (1.0, 1.0, "ours")}
    for name, (*scores, reader) in runs.items():
        rows = [
            (results.question(str(index), [results.output(score=score)], cluster=str(index)), None)
            for index, score in enumerate(scores)
        ]
        results.write_results(tmp_path / name, {"rooms": rows}, {"rooms": {"accuracy": 1.0, "reader": reader}})
    results.write_results(tmp_path / "other", {"stairs": []})
    assert comparison_lines(tmp_path / "right", [tmp_path / name for name in ("half", "wrong", "other")]) == [
        "rooms: 1.000, +0.500 against half, 95 % interval -1.000 to +1.000 (2 questions; better at 1, worse at 0)",
        "rooms: not alike: read by ours here, by video_mme/lmms there",
        "rooms: 1.000, +1.000 against wrong, no interval since all questions differ alike (2 questions; better at 2, "
        "worse at 0)",
        "other: no set to compare; here are rooms, there stairs",
    ]


def test_lines_of_figures_name_counts_as_reports_do() -> None:
    answers = [
        question("a", output(0.0, None, finish_reason="length", num_tokens=30)),
        question("b", fault=("cannot_decode", "damaged")),
    ]
    (line,) = table({"sets": {"rooms": aggregate("mean", answers).to_row()}})
    assert line.endswith(", 1 with bad media, 1 outputs unparsed, 1 outputs truncated)")

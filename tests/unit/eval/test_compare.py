"""Two runs on the same questions, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support import eval_results as results
from tests.unit.eval.questions import question
from vlm_pg.errors import VlmPgError
from vlm_pg.eval.compare import compare, comparison_lines
from vlm_pg.eval.contracts import Answered


def test_paired_difference_by_hand() -> None:
    """Differences 1 (v), 0 (v), 1 (w), 0 (u), -1 (u): mean 1/5, sums of deviations 3/5, 4/5, -7/5.

    Error sqrt(3/2 * (9 + 16 + 49) / 25) / 5 = 0.421426; t of 2 degrees 4.302653: 0.2 -+ 1.813251, of -1 to 1.
    """
    clusters = {"a": "v", "b": "v", "c": "w", "d": "u", "e": "u"}
    before = {"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": 1.0}
    after = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0, "e": 0.0}
    result = compare(*([question(name, run[name], cluster=clusters[name]) for name in run] for run in (before, after)))
    assert result.difference.value == pytest.approx(0.2)
    assert result.difference.standard_error == pytest.approx(math.sqrt(1.5 * 74 / 25) / 5)
    assert result.difference.interval == (-1.0, 1.0)
    assert (result.first, result.second) == (pytest.approx(0.4), pytest.approx(0.6))
    assert (result.n_better, result.n_worse, result.n_equal) == (2, 1, 2)
    assert result.to_row()["difference"]["clusters"] == 3
    # 16 videos like v, w and u of them each: error 0.421426 * sqrt(2/3 * 48/47) / 4, t of 47 degrees 2.011741.
    many = [(f"{name}{copy}", name, f"{clusters[name]}{copy}") for copy in range(16) for name in clusters]
    result = compare(*([question(i, run[name], cluster=video) for i, name, video in many] for run in (before, after)))
    reach = 2.011741 * 0.421426 * math.sqrt(2 / 3 * 48 / 47) / 4
    assert result.difference.interval == (pytest.approx(0.2 - reach, abs=1e-5), pytest.approx(0.2 + reach, abs=1e-5))


def test_pairs_err_less_than_two_means_would() -> None:
    """Both runs are right and wrong at the same questions, the second a little better: no error is left."""
    first = [question(str(index), float(index % 2) / 2) for index in range(10)]
    second = [question(str(index), float(index % 2) / 2 + 0.25) for index in range(10)]
    result = compare(first, second)
    assert result.difference.value == pytest.approx(0.25) and result.difference.standard_error == pytest.approx(0.0)


def test_two_questions_say_nothing_of_the_difference(tmp_path: Path) -> None:
    """One better, one equal: 0.5 with error 0.5, t of 1 degree 12.7, cut to what is possible. Both better: none."""
    for name, scores in (("wrong", (0.0, 0.0)), ("half", (0.0, 1.0)), ("right", (1.0, 1.0))):
        asked = [
            (results.question(str(index), [results.output(score=score)], cluster=str(index)), None)
            for index, score in enumerate(scores)
        ]
        results.write_results(tmp_path / name, {"rooms": asked}, {"rooms": {"accuracy": 1.0, "reader": "ours"}})
    assert comparison_lines(tmp_path / "right", [tmp_path / "half", tmp_path / "wrong"]) == [
        "rooms: 1.000, +0.500 against half, 95 % interval -1.000 to +1.000 (2 questions; better at 1, worse at 0)",
        "rooms: 1.000, +1.000 against wrong, no interval since all questions differ alike (2 questions; better at 2, "
        "worse at 0)",
    ]


def test_questions_are_paired_by_id_and_those_of_one_run_counted() -> None:
    first = [question("a", 0.0), question("b", 1.0), question("only first", 1.0), question("e", fault=("bad", ""))]
    second = [question("x", 1.0), question("y", 1.0), question("b", 1.0), question("a", 1.0), question("e", 1.0)]
    result = compare(first, second)
    assert result.difference.value == 0.5 and result.difference.n == 2
    assert (result.n_only_first, result.n_only_second, result.n_unscored) == (1, 2, 1)


def test_runs_without_a_shared_question_are_refused() -> None:
    with pytest.raises(VlmPgError, match=r"share 0 questions.*'a'.*'b'.*runs on the same set"):
        compare([question("a", 1.0)], [question("b", 1.0)])
    with pytest.raises(VlmPgError, match="share 1 questions, and none has a score in both"):
        compare([question("a", 1.0)], [question("a", fault=("cannot_decode", ""))])


def test_one_id_for_two_questions_is_refused() -> None:
    with pytest.raises(VlmPgError, match=r"1 of 2 shared ids are different questions.*'b'"):
        compare([question("a", 1.0), question("b", 1.0)], [question("a", 1.0), question("b", 1.0, gold="B")])


def test_a_question_twice_in_a_run_is_refused() -> None:
    with pytest.raises(VlmPgError, match="'a' is twice in the second run"):
        compare([question("a", 1.0)], [question("a", 1.0), question("a", 0.0)])


def test_another_value_than_the_score_can_be_compared() -> None:
    def recall(one: Answered) -> float | None:
        return None if one.score is None else float(one.score >= 0.5)

    result = compare([question("a", 0.4), question("b", 0.2)], [question("a", 0.6), question("b", 0.3)], recall)
    assert result.difference.value == 0.5


def test_other_readers_are_told(tmp_path: Path) -> None:
    one = results.question("1", [results.output()])
    for name, reader in (("a", "ours"), ("b", "video_mme/lmms"), ("c", "ours")):
        results.write_results(tmp_path / name, {"rooms": [(one, None)]}, {"rooms": {"accuracy": 1.0, "reader": reader}})
    lines = comparison_lines(tmp_path / "a", [tmp_path / "b", tmp_path / "c"])
    assert [line for line in lines if "read by" in line] == [
        "rooms: not alike: read by ours here, by video_mme/lmms there"
    ]

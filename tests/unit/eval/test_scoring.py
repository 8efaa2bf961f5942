"""The figures of an evaluation set, by hand."""

from __future__ import annotations

import pytest

from vlm_pg.eval.scoring import Scored, summarize


def item(name: str, *accuracies: float | None, media: str = "", category: str = "c", options: int = 4) -> Scored:
    return Scored(name, category, media or name, options, accuracies, tuple(1.0 for _ in accuracies))


def test_mean_over_questions_of_the_mean_over_rollouts() -> None:
    result = summarize([item("a", 1.0, 0.0), item("b", 1.0, 1.0, category="d")])
    assert result["accuracy"] == 0.75
    assert result["by_category"] == {"c": {"accuracy": 0.5, "n": 1}, "d": {"accuracy": 1.0, "n": 1}}
    assert result["chance"] == 0.25


def test_pass_at_k_is_unbiased() -> None:
    """One right of four: 1 - C(3, 2) / C(4, 2) = 1/2."""
    passes = summarize([item("a", 1.0, 0.0, 0.0, 0.0)])["pass_at_k"]
    assert passes == {"1": pytest.approx(0.25), "2": pytest.approx(0.5), "4": pytest.approx(1.0)}


def test_no_value_is_left_out_and_counted() -> None:
    result = summarize([item("a", None), item("b", 1.0), item("c", None, 0.0)])
    assert (result["accuracy"], result["n"], result["n_total"], result["n_no_value"]) == (0.5, 2, 3, 1)


def test_questions_about_one_video_share_their_error() -> None:
    """Deviations add up within a video before they are squared: two videos, each two equal questions."""
    together = summarize(
        [item("a", 1.0, media="v"), item("b", 1.0, media="v"), item("c", 0.0, media="w"), item("d", 0.0, media="w")]
    )
    apart = summarize([item("a", 1.0), item("b", 1.0), item("c", 0.0), item("d", 0.0)])
    assert apart["standard_error"] == pytest.approx(0.25)
    assert together["standard_error"] == pytest.approx(0.25 * 2**0.5)


def test_an_empty_set_has_no_figures() -> None:
    result = summarize([])
    assert result["accuracy"] is None and result["standard_error"] is None and result["n"] == 0

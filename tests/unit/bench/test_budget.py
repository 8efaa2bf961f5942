"""What is measured first, what is left out, and that nothing is left out without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlm_pg.bench.budget import Estimator, plan_point
from vlm_pg.bench.flops import chunk_rows, done_flops
from vlm_pg.bench.grid import StepPoint as Point
from vlm_pg.bench.results import Results
from vlm_pg.bench.shapes import SIZES
from vlm_pg.bench.step import CONTESTANTS, StepRun
from vlm_pg.errors import ConfigError

SMALL = SIZES["small"]
NAMES = list(CONTESTANTS)


def _points(*words: str) -> list[Point]:
    return StepRun.points(StepRun.parser().parse_args(list(words)))


def _flops(name: str, point: Point) -> float:
    """What a contestant computes; on a CPU, where a suffix behind its prefix takes a mask."""
    done = CONTESTANTS[name].done
    assert done is not None
    return done_flops(SMALL, done(point.prefix, point.lengths, chunk_rows(SMALL), True), False)


def _estimator() -> Estimator:
    arguments = StepRun.parser().parse_args(["--device", "cpu", "--threads", "1"])
    run = StepRun(arguments, Results.start(None, {}, "now", "step"))
    return replace(run.estimator, first_rate=1e10, start_seconds=1.0)


def test_the_whole_grid_starts_at_the_centre_of_every_prefix() -> None:
    points, prefixes = _points(), (1024, 4096, 8192, 16384)
    assert len(points) == len(set(points)) == 4 * 6 * 4
    assert [(p.prefix, p.response, p.generations) for p in points[:4]] == [(p, p // 8, 8) for p in prefixes]
    # Then one coordinate differs from the centre, then both.
    off = [(p.ratio != 8) + (p.generations != 8) for p in points]
    assert off == sorted(off)


def test_points_in_words_and_faults() -> None:
    assert _points("--points", "4096,8,512") == [Point(4096, 8, 512)]
    assert _points("--ragged", "--prefix", "64", "--response", "8", "--generations", "4") == [Point(64, 4, 8, True)]
    with pytest.raises(ConfigError, match="PREFIX,GENERATIONS,RESPONSE"):
        _points("--points", "4096,8")
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        Point(4096, 8, 1)


def test_ragged_lengths_are_drawn_once_and_for_all() -> None:
    point = Point(1024, 16, 128, ragged=True)
    assert point.lengths == Point(1024, 16, 128, ragged=True).lengths
    assert all(32 <= length <= 128 for length in point.lengths) and len(set(point.lengths)) > 4
    assert Point(1024, 2, 128).lengths == (128, 128)


def test_estimates_follow_what_was_measured() -> None:
    estimator = _estimator()
    near, far = Point(1024, 8, 128), Point(4096, 8, 512)
    operations = {point: _flops("grouped", point) for point in (near, far)}
    assert estimator.seconds("grouped", near) == pytest.approx(operations[near] / 1e10)
    estimator.learn("grouped", near, seconds=3.0, peak_bytes=1000)
    assert estimator.seconds("grouped", near) == pytest.approx(3.0)
    assert estimator.seconds("grouped", far) == pytest.approx(3.0 * operations[far] / operations[near])
    assert estimator.peak_bytes("grouped", near) == pytest.approx(1000)
    # A contestant not yet seen is judged by the slowest one seen.
    factor = 3.0 / operations[near]
    theirs = _flops("transformers-batch", near)
    assert estimator.seconds("transformers-batch", near) == pytest.approx(factor * theirs)


def test_without_limits_everybody_runs() -> None:
    plan = plan_point(Point(512, 4, 64), NAMES, _estimator(), 5, None, None, None)
    assert plan.contestants == NAMES and not plan.skipped


def test_a_budget_leaves_out_the_expensive_and_says_so() -> None:
    point, estimator = Point(2048, 16, 64), _estimator()
    cost = {name: 4 * estimator.seconds(name, point) for name in NAMES}
    total = 2 * (1.0 + cost["grouped"] + cost["prefix-grouper-kind"] + 0.1)  # one point gets half
    plan = plan_point(point, NAMES, estimator, 4, total, total, None)
    assert plan.contestants == ["grouped", "prefix-grouper-kind"]
    assert set(plan.skipped) == set(NAMES) - set(plan.contestants)
    assert all("expected to take" in reason and "a point's most" in reason for reason in plan.skipped.values())
    late = plan_point(point, NAMES, estimator, 4, 0.5, total, None)
    assert not late.contestants and late.seconds == 0 and set(late.skipped) == set(NAMES)
    assert "left of the budget" in late.skipped["grouped"]


def test_ours_alone_is_not_worth_a_point() -> None:
    point, estimator = Point(2048, 16, 64), _estimator()
    total = 2 * (1.0 + 4 * estimator.seconds("grouped", point) + 0.1)
    plan = plan_point(point, ["grouped", "transformers-batch"], estimator, 4, total, total, None)
    assert not plan.contestants
    assert "nothing to compare it with" in plan.skipped["grouped"]


def test_memory_leaves_out_who_would_not_fit() -> None:
    point, estimator = Point(2048, 16, 64), _estimator()
    limit = estimator.peak_bytes("transformers-batch", point) - 1
    plan = plan_point(
        point, ["grouped", "transformers-sequential", "transformers-batch"], estimator, 4, None, None, limit
    )
    assert plan.contestants == ["grouped", "transformers-sequential"]
    assert "GiB" in plan.skipped["transformers-batch"]

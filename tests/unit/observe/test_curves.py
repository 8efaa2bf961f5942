"""Long metrics are drawn with few points that keep their extremes."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.observe.builders import make_group
from vlm_pg.observe.logs import RolloutsLog
from vlm_pg.observe.report import write_report
from vlm_pg.observe.report.charts import (
    MAX_POINTS,
    Curve,
    LineChart,
    draw_chart,
    kept_points,
    make_curve,
    make_frame,
    nice_ticks,
    rolling_mean,
    tick_label,
)
from vlm_pg.observe.report.read import Series
from vlm_pg.observe.report.rollouts import choose_questions
from vlm_pg.observe.run_folder import RunFolder

finite = st.floats(-1e12, 1e12, allow_nan=False)


def curve(values: list[float]) -> Curve:
    return make_curve("x", Series(array("q", range(1, len(values) + 1)), array("d", values)))


def test_rolling_mean_by_hand() -> None:
    assert rolling_mean([0, 3, 6, 0], 3) == [1.5, 3, 3, 3]
    assert rolling_mean([1, 2], 1) == [1, 2]


@given(st.lists(finite, min_size=1, max_size=300), st.integers(4, 60))
def test_kept_points_hold_the_extremes_and_both_ends(values: list[float], limit: int) -> None:
    kept = kept_points(values, limit)
    assert len(kept) <= max(limit, 1) or len(values) <= limit
    assert kept == sorted(set(kept))
    assert {0, len(values) - 1} <= set(kept)
    assert min(values[index] for index in kept) == min(values)
    assert max(values[index] for index in kept) == max(values)


def test_a_long_metric_keeps_its_spike() -> None:
    values = [0.0] * 200_000
    values[123_456] = 7.0
    drawn = curve(values)
    assert len(drawn.steps) <= MAX_POINTS
    assert drawn.values[drawn.steps.index(123_457)] == 7.0


@given(st.lists(finite, min_size=1, max_size=60), st.booleans())
def test_any_finite_values_can_be_drawn_inside_the_frame(values: list[float], as_percent: bool) -> None:
    svg = draw_chart(LineChart("x", "", (curve(values),), as_percent))
    heights = [float(y) for path in re.findall(r' d="M([^"]*)"', svg) for y in re.findall(r" (-?[\d.]+)", path)]
    assert all(0 <= height <= 220 for height in heights)
    assert not re.search(r"nan|inf", svg)


def test_ticks_are_round_and_labels_have_the_decimals_they_need() -> None:
    assert nice_ticks(0, 1, 4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(1, 300, 6) == [50, 100, 150, 200, 250, 300]
    plain, shares = LineChart("x", "", ()), LineChart("x", "", (), as_percent=True)
    assert [tick_label(tick, 0.25, plain) for tick in (0, 0.25, 0.5, -0.5)] == ["0", "0.25", "0.50", "−0.50"]
    assert tick_label(5000, 5000, plain) == "5,000"
    assert tick_label(2e-6, 1e-6, plain) == "2.0e-6"
    assert tick_label(0.25, 0.25, shares) == "25\u202f%"


def test_rare_spikes_are_cut_and_said() -> None:
    values = [1.0 + 0.01 * (index % 7) for index in range(200)]
    values[50] = 500.0
    chart = LineChart("Gradient norm", "", (curve(values),))
    frame, clipped = make_frame(chart)
    assert clipped == 500.0
    assert frame.high < 3
    assert "spikes up to 500 are cut" in draw_chart(chart)


def test_a_long_run_stays_a_small_file_with_the_step_order_repaired(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    with folder.metrics.open("w") as file:
        for step in [*range(3000, 6001), *range(1, 3000), 5]:
            file.write(json.dumps({"step": step, "phase": "train", "reward": step % 10, "kl": step}) + "\n")
    html = write_report(folder.path).read_text("utf-8")
    data = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    assert len(data) == 2
    for chart in data:
        steps = chart["curves"][0]["steps"]
        assert len(steps) <= MAX_POINTS
        assert steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (1, 6000)


def test_questions_seen_again_come_first_and_categories_take_turns(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    with RolloutsLog(folder, groups_per_step=9, thumbnail_frames=0) as log:
        log.write(1, [make_group("once, early"), make_group("far apart")])
        log.write(2, [make_group("near"), make_group("near")])
        log.write(3, [make_group("near")])
        log.write(9, [make_group("far apart"), make_group("once, late")])
    questions = choose_questions(folder.rollouts, 4)
    seen = [(q.record["sample_id"], [encounter.step for encounter in q.encounters]) for q in questions]
    assert seen == [("far apart", [1, 9]), ("near", [2, 3]), ("once, early", [1]), ("once, late", [9])]
    assert all(len(encounter.rollouts) == 2 for q in questions for encounter in q.encounters)

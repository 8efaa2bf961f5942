"""A box is read in its usual spellings and scored by intersection over union."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.overlap import check_box, parse_boxes
from vlm_pg.answers.verdict import Verdict
from vlm_pg.rewards.settings import RewardSettings

SETTINGS = RewardSettings()
BOX = (10.0, 20.0, 30.0, 40.5)


def check(answer: str, gold: str = "[10, 20, 30, 40.5]") -> Verdict:
    return check_box(answer, make_sample("box", gold), SETTINGS)


@pytest.mark.parametrize(
    "text",
    ["[10, 20, 30, 40.5]", "10,20,30,40.5", "[10 20 30 40.5]", "(10, 20), (30, 40.5)", "[[10, 20], [30, 40.5]]"]
    + ['{"bbox_2d": [10, 20, 30, 40.5], "label": "cat 2"}', '```json\n[{"bbox_2d": [10, 20, 30, 40.5]}]\n```']
    + ["<|box_start|>(10,20),(30,40.5)<|box_end|>", "2nd one at [10.0, 20.0, 30.0, 40.50].", "[１０, 20, 30, 40.5]"]
    + ["In the 640 x 480 image: [10, 20, 30, 40.5]", "[10, 20, 30, 40.5], [10, 20, 30, 40.5]"],
)  # fmt: skip
def test_usual_spellings(text: str) -> None:
    assert parse_boxes(text) == {BOX}
    assert check(text).value == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "none", "[10, 20, 30]", "[10, 20, 30, 40, 50]", "(1, 2), (3, 4), (5, 6)", "[1, 2] and then [3, 4]", "1.2.3.4"]
    + ["[1, 2, 3, 1e5]", "[1, 2, 3, " + "9" * 400 + "]", "x10 y20 x30 y40"]
    + [f"[-1{'0' * 308}, 5, 1{'0' * 308}, 5]", f"[0, 0, 1{'0' * 200}, 1{'0' * 200}]"],
)
def test_what_is_no_box(text: str) -> None:
    assert check(text) == Verdict(0.0, "answer states no box")


@pytest.mark.parametrize("answer", ["[10, 20, 30, 40.5] or [0, 0, 1, 1]", "[10, 20, 30, 40.5], [10, 20, 30, 41]"])
def test_several_different_boxes_are_wrong(answer: str) -> None:
    assert check(answer) == Verdict(0.0, "answer states several different boxes")


@pytest.mark.parametrize("answer", ["[30, 20, 10, 40.5]", "[10, 20, 10, 40]", "[10, 20, 30, 20]", "[30, 40, 10, 20]"])
def test_a_box_without_area_is_wrong_and_as_gold_has_no_value(answer: str) -> None:
    assert check(answer) == Verdict(0.0, "answered box has no area; x1 < x2 and y1 < y2 are needed")
    assert check("[1, 2, 3, 4]", gold=answer).value is None


@pytest.mark.parametrize("gold", ["??", "[1, 2, 3]", "[1, 2, 3, 4] or [1, 2, 3, 5]"])
def test_gold_that_is_not_one_box_has_no_value(gold: str) -> None:
    verdict = check("[1, 2, 3, 4]", gold)
    assert verdict.value is None and "does not state one box" in verdict.note


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("[0, 0, 2, 2]", "[1, 1, 3, 3]", 1 / 7),  # 1 of 4 + 4 - 1
        ("[0, 0, 2, 2]", "[0, 0, 4, 2]", 0.5),
        ("[0, 0, 2, 2]", "[2, 0, 4, 2]", 0.0),  # they touch
        ("[0, 0, 1, 1]", "[5, 5, 6, 6]", 0.0),
        ("[-1, -1, 1, 1]", "[0, 0, 1, 1]", 0.25),
    ],
)
def test_intersection_over_union(answer: str, gold: str, value: float) -> None:
    assert check(answer, gold).value == pytest.approx(value, abs=1e-12)


SIDES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).filter(lambda side: side[0] < side[1])


@given(SIDES, SIDES, SIDES, SIDES)
def test_agrees_with_counting_cells(
    left_x: list[int], left_y: list[int], right_x: list[int], right_y: list[int]
) -> None:
    left = {(x, y) for x in range(*left_x) for y in range(*left_y)}
    right = {(x, y) for x in range(*right_x) for y in range(*right_y)}
    answer = [left_x[0], left_y[0], left_x[1], left_y[1]]
    gold = [right_x[0], right_y[0], right_x[1], right_y[1]]
    assert check(str(answer), str(gold)).value == pytest.approx(len(left & right) / len(left | right), abs=1e-12)

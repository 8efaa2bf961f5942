"""A span of time is read in its usual spellings and scored by intersection over union."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.overlap import check_time_span, parse_spans
from vlm_pg.answers.verdict import Verdict
from vlm_pg.rewards.settings import RewardSettings

SETTINGS = RewardSettings()


def check(answer: str, gold: str = "[12.5, 30]") -> Verdict:
    return check_time_span(answer, make_sample("time_span", gold), SETTINGS)


@pytest.mark.parametrize(
    "text",
    ["[12.5, 30]", "(12.5, 30.0)", "<12.5, 30>", "12.5 - 30 seconds", "12.5-30", "12.5s - 30s", "12.5 – 30 s"]
    + ["from 12.5 to 30 seconds", "between 12.5 and 30 sec", "12.5 until 30.", "0:12.5 to 0:30", "12.5~30"]
    + ["00:00:12.5 --> 00:00:30"]
    + ['{"start": 12.5, "end": 30}', "start_time: 12.5, end_time: 30", "It starts at 12.5 s and ends at 30 s."]
    + ["The 2 men run from 12.5 to 30.", "[12.5, 30], [12.5, 30]", "[１２.５, 30]", "**12.5 - 30**"],
)  # fmt: skip
def test_usual_spellings(text: str) -> None:
    assert parse_spans(text) == {(12.5, 30.0)}
    assert check(text).value == 1.0


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("from 0:12 to 1:05", (12.0, 65.0)),
        ("1:02:03 - 1:02:04.5", (3723.0, 3724.5)),
        ("1 to 2 minutes", (60.0, 120.0)),
        ("1 min 5 s to 2 min", (65.0, 120.0)),
        ("50 s to 1.5 minutes", (50.0, 90.0)),
        ("[-5, 10]", (-5.0, 10.0)),
    ],
)
def test_clocks_minutes_and_signs(text: str, span: tuple[float, float]) -> None:
    assert parse_spans(text) == {span}


@pytest.mark.parametrize("text", ["", "12", "never", "[1, 2, 3]", "12 frames, then 30 frames", "0:12 to 0:75"])
def test_what_is_no_span(text: str) -> None:
    assert check(text) == Verdict(0.0, "answer states no span of time")


def test_several_different_spans_are_wrong() -> None:
    assert check("[12.5, 30] or [40, 50]") == Verdict(0.0, "answer states several different spans")


@pytest.mark.parametrize("answer", ["[30, 12.5]", "[12, 12]"])
def test_a_span_that_does_not_end_after_it_starts(answer: str) -> None:
    assert check(answer) == Verdict(0.0, "answered span does not end after it starts")
    assert check("[1, 2]", gold=answer).value is None


@pytest.mark.parametrize("gold", ["??", "12", "[1, 2] or [3, 4]"])
def test_gold_that_is_not_one_span_has_no_value(gold: str) -> None:
    verdict = check("[1, 2]", gold)
    assert verdict.value is None and "does not state one span" in verdict.note


SPANS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).filter(lambda span: span[0] < span[1])


@given(SPANS, SPANS)
def test_agrees_with_counting_seconds(answer: list[int], gold: list[int]) -> None:
    left, right = set(range(*answer)), set(range(*gold))
    assert check(str(answer), str(gold)).value == pytest.approx(len(left & right) / len(left | right), abs=1e-12)

"""Numbers are matched, never evaluated; numerical and regression answers follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rewards.helpers import make_sample
from vlm_pg.rewards.numbers import MAX_NUMBER_CHARACTERS, parse_number
from vlm_pg.rewards.numerical import check_numerical
from vlm_pg.rewards.regression import check_regression
from vlm_pg.rewards.settings import RewardSettings

SETTINGS = RewardSettings()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0), ("5.", 5.0), (".5", 0.5), ("-3", -3.0), ("−3", -3.0), ("+3", 3.0), ("1,234.5", 1234.5),
        ("1 234 567", 1234567.0), ("1\u202f234", 1234.0), ("$5.20", 5.2), ("€7", 7.0), ("50 %", 50.0), ("1/2", 0.5),
        ("1 1/2", 1.5), ("-1 1/2", -1.5), ("½", 0.5), ("1½", 1.5), (r"\frac{3}{4}", 0.75), (r"\boxed{12}", 12.0),
        ("2 + 3 = 5", 5.0), ("5 m^2", 5.0), ("5 m²", 5.0), (r"5^\circ", 5.0), ("3e5", 3e5), ("3 x 10^5", 3e5),
        (r"3\times 10^{-2}", 0.03), ("There are 7 cars.", 7.0), ("5 (that is 5.0)", 5.0), ("2nd", 2.0), ("12kg", 12.0),
    ],
)  # fmt: skip
def test_one_stated_number(text: str, value: float) -> None:
    number = parse_number(text)
    assert number is not None
    assert number.value == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "five", "H2O", "3,5", "10-15", "3 - 4", "3 or 4", "1:30", "1.2.3", "10^6", "10²", "1e999", "1/0", "nan", "inf"]
    + ["1,2345", "__import__('os').getpid()", "9" * (MAX_NUMBER_CHARACTERS + 1)],
)  # fmt: skip
def test_no_or_several_numbers(text: str) -> None:
    assert parse_number(text) is None


@given(st.floats(-1e9, 1e9), st.integers(0, 6))
def test_any_decimal_is_read_back(value: float, places: int) -> None:
    for written in (f"{value:.{places}f}", f"{value:,.{places}f}"):
        number = parse_number(f"It is {written} metres")
        assert number is not None
        assert number.value == float(written.replace(",", ""))


@given(st.text(alphabet="0123456789 ,./-+^%eE$=\\{}x*()", max_size=MAX_NUMBER_CHARACTERS))
def test_hostile_text_is_parsed_or_refused(text: str) -> None:
    number = parse_number(text)
    assert number is None or abs(number.value) < float("inf")


@pytest.mark.parametrize(
    ("answer", "gold", "accuracy"),
    [
        ("5", "5.0", 1.0), ("5.004", "5", 1.0), ("5.01", "5", 0.0), ("1,000", "1000", 1.0), ("-5", "5", 0.0),
        ("50%", "50", 1.0), ("50", "50%", 1.0), ("50%", "0.5", 1.0), ("0.4%", "0", 0.0), ("0.5", "50", 0.0),
        ("3 apples", "3", 1.0), ("none", "3", 0.0), ("3 or 4", "3", 0.0),
    ],
)  # fmt: skip
def test_numerical_accuracy(answer: str, gold: str, accuracy: float) -> None:
    assert check_numerical(answer, make_sample("numerical", gold), SETTINGS).value == accuracy


def test_rounding_follows_the_setting() -> None:
    sample = make_sample("numerical", "3.14")
    assert check_numerical("3.1", sample, SETTINGS).value == 0.0
    assert check_numerical("3.1", sample, RewardSettings(numerical_decimal_places=1)).value == 1.0


@pytest.mark.parametrize("check", [check_numerical, check_regression])
@pytest.mark.parametrize("gold", ["unknown", "3 to 4", ""])
def test_unreadable_gold_has_no_value(check, gold: str) -> None:
    verdict = check("3", make_sample("numerical", gold), SETTINGS)
    assert verdict.value is None
    assert "does not state one number" in verdict.note


@pytest.mark.parametrize(
    ("answer", "gold", "accuracy"),
    [("8", "10", 0.8), ("12", "10", 0.8), ("30", "10", 0.0), ("-10", "10", 0.0), ("-8", "-10", 0.8), ("?", "10", 0.0)],
)
def test_regression_accuracy(answer: str, gold: str, accuracy: float) -> None:
    value = check_regression(answer, make_sample("regression", gold), SETTINGS).value
    assert value == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.parametrize("answer", ["0", "1", "?"])
def test_regression_to_zero_has_no_value_whatever_was_predicted(answer: str) -> None:
    verdict = check_regression(answer, make_sample("regression", "0"), SETTINGS)
    assert verdict.value is None
    assert verdict.note == "gold answer is 0, to which a relative error is undefined"

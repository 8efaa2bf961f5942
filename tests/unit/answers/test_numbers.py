"""Numbers are matched, never evaluated; numerical and regression answers follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.numbers import (
    MAX_NUMBER_CHARACTERS,
    check_mean_relative_accuracy,
    check_numerical,
    check_regression,
    read_answer_to,
    read_quantity,
)
from vlm_pg.rewards.settings import RewardSettings

SETTINGS = RewardSettings()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0), ("5.", 5.0), (".5", 0.5), ("-3", -3.0), ("−3", -3.0), ("+3", 3.0), ("1,234.5", 1234.5),
        ("1 234 567", 1234567.0), ("1\u202f234", 1234.0), ("$5.20", 5.2), ("€7", 7.0), ("50 %", 50.0), ("1/2", 0.5),
        ("1 1/2", 1.5), ("-1 1/2", -1.5), ("½", 0.5), ("1½", 1.5), (r"\frac{3}{4}", 0.75), (r"\boxed{12}", 12.0),
        ("2 + 3 = 5", 5.0), ("5 m^2", 5.0), ("5 m²", 5.0), (r"5^\circ", 5.0), ("3e5", 3e5), ("3 x 10^5", 3e5),
        ("$18", 18.0), (r"\$18.00", 18.0), ("18 dollars.", 18.0), ("18 km/h", 18.0), (r"18 \text{ cm}^{2}", 18.0),
        ("18.00", 18.0), ("£18 per hour", 18.0), ("18°C", 18.0), (r"1{,}234", 1234.0), (r"18\%", 18.0),
        (r"3\times 10^{-2}", 0.03), ("There are 7 cars.", 7.0), ("5 (that is 5.0)", 5.0), ("2nd", 2.0), ("12kg", 12.0),
        ("10^6", 1e6), ("10²", 100.0), ("2^-2", 0.25),
    ],
)  # fmt: skip
def test_one_stated_number(text: str, value: float) -> None:
    number = read_quantity(text)[0]
    assert number is not None
    assert number.value == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "five", "H2O", "3,5", "10-15", "3 - 4", "3 or 4", "1:30", "1.2.3", "10^999", "1e999", "1/0", "nan", "inf"]
    + ["1,2345", "__import__('os').getpid()", "9" * (MAX_NUMBER_CHARACTERS + 1)],
)  # fmt: skip
def test_no_or_several_numbers(text: str) -> None:
    assert read_quantity(text)[0] is None


@given(st.floats(-1e9, 1e9), st.integers(0, 6))
def test_any_decimal_is_read_back(value: float, decimals: int) -> None:
    for written in (f"{value:.{decimals}f}", f"{value:,.{decimals}f}"):
        number = read_quantity(f"It is {written} metres")[0]
        assert number is not None
        assert number.value == float(written.replace(",", ""))


@given(st.text(alphabet="0123456789 ,./-+^%eE$=\\{}x*()", max_size=MAX_NUMBER_CHARACTERS))
def test_hostile_text_is_parsed_or_refused(text: str) -> None:
    number = read_quantity(text)[0]
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


@pytest.mark.parametrize(
    ("answer", "gold", "accuracy"),
    [("95", "100", 1.0), ("105", "100", 1.0), ("94", "100", 0.0), ("-95", "-100", 1.0), ("-100", "100", 0.0)]
    + [("0.1", "0", 0.0), ("49%", "0.5", 1.0), ("40%", "0.5", 0.0), ("1.05", "1", 1.0), ("10,400 km", "10000", 1.0)],
)
def test_the_tolerance_is_a_share_of_the_gold_number(answer: str, gold: str, accuracy: float) -> None:
    settings = RewardSettings(numerical_tolerance=0.05)
    assert check_numerical(answer, make_sample("numerical", gold), settings).value == accuracy


def test_tolerance_and_rounding_each_suffice() -> None:
    sample = make_sample("numerical", "0.001")
    assert check_numerical("0.001", sample, RewardSettings(numerical_tolerance=0.1)).value == 1.0
    assert check_numerical("3.1449", make_sample("numerical", "3.14"), RewardSettings()).value == 1.0
    strict = RewardSettings(numerical_tolerance=0.1, numerical_decimal_places=6)
    assert check_numerical("0.002", sample, strict).value == 0.0
    assert check_numerical("0.0011", sample, strict).value == 1.0


@pytest.mark.parametrize(
    ("answer", "gold", "accuracy"),
    [("0", "0.001", 0.0), ("0.004", "0.001", 0.0), ("0.00105", "0.001", 1.0), ("0.006", "0.014", 0.0)]
    + [("0.04", "0.04", 1.0), ("0.05", "0.054", 1.0), ("0.001", "0", 1.0), ("0.004", "-0.004", 0.0)]
    + [("5.001", "5", 1.0)],
)
def test_rounding_does_not_erase_a_small_gold_number(answer: str, gold: str, accuracy: float) -> None:
    assert check_numerical(answer, make_sample("numerical", gold), SETTINGS).value == accuracy


def test_numbers_beyond_a_floats_digits_are_compared_as_written() -> None:
    sample = make_sample("numerical", "12345678901234567")
    assert check_numerical("12345678901234568", sample, SETTINGS).value == 0.0
    assert check_numerical("12,345,678,901,234,567", sample, SETTINGS).value == 1.0
    near = RewardSettings(numerical_tolerance=0.01)
    assert check_numerical("12345678901234568", sample, near).value == 1.0


@pytest.mark.parametrize("check", [check_numerical, check_regression, check_mean_relative_accuracy])
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


@pytest.mark.parametrize(
    ("answer", "gold", "accuracy"),
    [
        ("10", "10", 1.0),
        ("3", "4", 0.5),  # error 0.25 < 1 - t for t = .50, .55, .60, .65, .70; at .75 they are equal
        ("5", "10", 0.0),  # error 0.5, equal at the lowest threshold
        ("2.7", "3", 0.8),  # error 0.1, equal at t = .90; in binary it is slightly less
        ("9.6", "10", 1.0),
        ("9.5", "10", 0.9),
        ("14.9", "10", 0.1),
        ("-10", "10", 0.0),
        ("-3", "-4", 0.5),
        ("about 3 metres", "4", 0.5),
        ("3 or 4", "4", 0.0),
    ],
)
def test_mean_relative_accuracy(answer: str, gold: str, accuracy: float) -> None:
    value = check_mean_relative_accuracy(answer, make_sample("mean_relative_accuracy", gold), SETTINGS).value
    assert value == pytest.approx(accuracy, abs=1e-12)


@given(st.integers(-300, 300), st.integers(1, 100))
def test_mean_relative_accuracy_agrees_with_whole_numbers(predicted: int, gold: int) -> None:
    value = check_mean_relative_accuracy(
        str(predicted / 100), make_sample("mean_relative_accuracy", str(gold / 100)), SETTINGS
    ).value
    assert value == sum(100 * abs(predicted - gold) < gold * (100 - percent) for percent in range(50, 100, 5)) / 10


@pytest.mark.parametrize("check", [check_regression, check_mean_relative_accuracy])
@pytest.mark.parametrize("answer", ["0", "1", "?"])
def test_a_relative_error_to_zero_has_no_value_whatever_was_predicted(check, answer: str) -> None:
    verdict = check(answer, make_sample("regression", "0"), SETTINGS)
    assert verdict.value is None
    assert verdict.note == "gold answer is 0, to which a relative error is undefined"


@pytest.mark.parametrize(
    "text",
    ["\\sqrt{45}", "\\boxed{3\\sqrt{5}}", "45\\pi", "45π", "\\frac{\\pi}{4}", "\\frac{45}{\\sqrt{3}}", "\\sqrt[3]{45}"]
    + ["45 \\cdot \\pi", "more than \\boxed{45}", "45 or \\boxed{46}"],
)
def test_a_formula_is_not_the_number_in_it(text: str) -> None:
    assert read_quantity(text)[0] is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3\\sqrt{2} \\approx 4.24", 4.24),
        ("1\\frac12", 1.5),
        ("We see 2 cats and 3 dogs.\n\n\\boxed{5}", 5.0),
        ("x" * 500 + " \\boxed{5}", 5.0),
        ("\\boxed{\\text{minus }3}", -3.0),
    ],
)
def test_the_number_a_formula_comes_to(text: str, value: float) -> None:
    parsed = read_quantity(text)[0]
    assert parsed is not None and parsed.value == value


@pytest.mark.parametrize(
    ("answer", "same"),
    [("5\\text{ kg}", False), ("$\\boxed{5~\\mathrm{kg}}$", False), ("\\boxed{5} kg", False), ("答案是5 kg。", False)]
    + [("5 kg的水", False), ("5\\mathrm{~cm}", True), ("$5\\,\\text{cm}$", True), ("5厘米", True), ("$5$", True)],
)
def test_units_in_formulas_count(answer: str, same: bool) -> None:
    gold, number = read_answer_to("5 cm", answer)
    assert (number == gold) == same

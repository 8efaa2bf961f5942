"""What all readers of answers share: one spelling, lead-ins, clauses that reject, units."""

from __future__ import annotations

from fractions import Fraction

import pytest

from vlm_pg.answers.clauses import affirmed, clauses, explicit_statement, without_lead_in
from vlm_pg.answers.plain_text import MAX_SHORT_CHARACTERS, plain, plain_formula, plain_short, without_marks, words
from vlm_pg.answers.units import parse_unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("１２．５\u00a0µm", "12.5 μm"),
        ("٣ + १", "3 + 1"),
        ("−5 – 6", "-5 - 6"),
        ("yes—it", "yes - it"),
        ("B\u200b\u202e", "B"),
        ("（Ｂ）", "(B)"),
    ],
)
def test_one_spelling(text: str, expected: str) -> None:
    assert plain(text) == expected


def test_powers_and_fractions_keep_their_sense() -> None:
    assert plain_formula("5 m²") == "5 m^2"
    assert plain_formula("1½").split() == ["1", "1/2"]


@pytest.mark.parametrize("text", ["a" * (MAX_SHORT_CHARACTERS + 1), "ﷺ" * 1000])
def test_what_is_too_long_for_a_short_answer_is_not_read(text: str) -> None:
    assert plain_short(text) == ""
    assert plain_short(text[:10]) != ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**six**", "six"),
        ("_0.75_", "0.75"),
        ("a_b and x_1", "a_b and x_1"),
        ("`B`", "B"),
        ("~~A~~ B", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("“red”", "red"),
        ("A*", "A"),
    ],
)
def test_marks(text: str, expected: str) -> None:
    assert without_marks(text) == expected


def test_words_of_scripts_without_gaps_are_characters() -> None:
    assert words("出口 Exit 5") == ["出", "口", "Exit", "5"]


@pytest.mark.parametrize(
    "text",
    ["The answer is B", "So the final answer is: B", "Answer: B", "I think it is B", "My answer: B", "答案是B", "答：B"]
    + ["所以最终答案是：B", "我选择B", "选B", "Ответ: B", "La respuesta correcta es B", "La réponse est B"]
    + ["Die Antwort lautet B", "A resposta é B", "La risposta è B", "答えはBです", "정답은 B입니다", "उत्तर: B"]
    + ["الإجابة هي B", "B is the answer", "B is the correct option."],
)
def test_lead_ins_and_endings(text: str) -> None:
    assert without_lead_in(plain(text)) == "B"


def test_a_lead_in_leaves_a_negation() -> None:
    assert without_lead_in("The answer is not B") == "not B"


def test_the_one_explicit_statement() -> None:
    assert explicit_statement("Step 6: the answer is 9") == "9"
    assert explicit_statement("the answer is 9 or the answer is 8") is None
    assert explicit_statement("9") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B, not A.", [("B", 0), ("not A.", 1)]),
        ("A and C are wrong", [("A and C are wrong", 1)]),
        ("anything but B", [("anything but B", 1)]),
        ("not only B", [("not only B", 0)]),
        ("B is not wrong", [("B is not wrong", 2)]),
        ("B, which is wrong", [("B", 1)]),
        ("A是错的，B对", [("A是错的", 1), ("B对", 0)]),
        ("不是A而是B", [("不是A", 1), ("而是B", 0)]),
    ],
)
def test_clauses(text: str, expected: list[tuple[str, int]]) -> None:
    found = [(clause.text, clause.rejections) for clause in clauses(plain(text))]
    assert [rejections for _, rejections in found] == [rejections for _, rejections in expected]
    assert len(found) == len(expected)


def test_what_is_affirmed() -> None:
    assert affirmed("It is 5, not 6") == "It is 5"
    assert affirmed("1,234 m, and more") == "1,234 m, and more"
    assert affirmed("not 5") == ""


@pytest.mark.parametrize(
    ("left", "right", "factor"),
    [
        ("cm", "m", Fraction(1, 100)),
        ("km/h", "m/s", Fraction(5, 18)),
        ("kilometres per hour", "km/h", 1),
        ("square metres", "m^2", 1),
        ("m2", "cm^2", 10_000),
        ("kg·m/s^2", "kg m / s^2", 1),
        ("litres", "cm^3", 1000),
        ("μV", "mV", Fraction(1, 1000)),
        ("分钟", "秒", 60),
        ("degrees Celsius", "°C", 1),
        ("mW", "MW", Fraction(1, 10**9)),
        ("m", "s", None),
        ("m", "m^2", None),
        ("€", "$", None),
    ],
)
def test_units(left: str, right: str, factor: Fraction | None) -> None:
    first, second = parse_unit(left), parse_unit(right)
    assert first is not None and second is not None
    assert first.factor_to(second) == factor


@pytest.mark.parametrize("text", ["", "x", "apples", "km//", "m^9", "5", "m" * 41, "answer"])
def test_what_is_no_unit(text: str) -> None:
    assert parse_unit(text) is None

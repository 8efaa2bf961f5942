"""Statements in their parts: solutions, names, units; and what equations say of a value."""

from __future__ import annotations

import pytest

from vlm_pg.answers.expressions import value_of_equation
from vlm_pg.answers.latex import as_latex, read_parts, tuple_elements
from vlm_pg.answers.mathematics import _parse, refusal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 1/2", "1\\frac{1}{2}"),
        ("10\\,000", "10000"),
        ("1 234 567", "1234567"),
        ("(1,234)", "(1,234)"),
        ("1{,}000.99", "1000.99"),
        ("3.2 x 10^5", "3.2 \\cdot 10^{5}"),
        ("2 million", "2 \\cdot 10^{6}"),
        ("0.1\\overline{6}", "\\frac{15}{90}"),
        ("\\varnothing", "\\emptyset "),
        ("\\frac 1 2", "\\frac{1}{2}"),
        ("[[1,2],[3,4]]", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
        ("1 \\\\ 2", "1 \\\\ 2"),
    ],
)
def test_plain_spelling_becomes_latex(text: str, expected: str) -> None:
    assert as_latex(text).replace("  ", " ") == expected


@pytest.mark.parametrize("text", ["1 1", "2 3/2", "7 0000"])
def test_numbers_side_by_side_are_refused(text: str) -> None:
    assert refusal(as_latex(text)) == "it has two numbers side by side"


@pytest.mark.parametrize(
    ("latex", "parts"),
    [
        ("1; 2, 3", ["1", "2", "3"]),
        ("(1,2), (3,4)", ["(1,2)", "(3,4)"]),
        ("\\{1, 2\\}", ["1", "2"]),
        ("x = \\pm 2", ["x=2", "x=-2"]),
        ("2 \\text{ or } 3", ["2", "3"]),
        ("5 \\text{ km/h}", ["5"]),
        ("\\$18.90", ["18.90"]),
        ("5 \\%", ["5"]),
    ],
)
def test_parts(latex: str, parts: list[str]) -> None:
    assert ["".join(part.latex.split()) for part in read_parts(latex, letters_are_units=False).parts] == parts


def test_letters_are_units_only_where_no_variables_may_stand() -> None:
    assert read_parts("5 m", letters_are_units=False).parts[0].unit is None
    assert read_parts("5 m", letters_are_units=True).parts[0].unit is not None
    assert read_parts("5 cm", letters_are_units=False).parts[0].unit is not None


def test_names_and_bases() -> None:
    first, second = read_parts("x_{1} = 2, y = 3", letters_are_units=False).parts
    assert (first.name, first.variable, first.value, second.name) == ("x_1", "x", "2", "y")
    assert read_parts("52_8", letters_are_units=False).parts[0].base == "8"


@pytest.mark.parametrize(
    ("latex", "elements"), [("(1, 2)", ["1", "2"]), ("(1)", None), ("1, 2", None), ("[1,2]", None)]
)
def test_tuples(latex: str, elements: list[str] | None) -> None:
    assert tuple_elements(latex) == elements


@pytest.mark.parametrize(
    ("latex", "value"),
    [("x = 5", 5), ("2 + 3 = 5", 5), ("5 = x", 5), ("x = 2 + 3 = 5", 5), ("f(2) = 5", 5), ("4 = 5", None)]
    + [("x = 4 = 5", None), ("x + 1 = 5", None), ("2x = 5", None)],
)
def test_the_value_that_an_equation_gives(latex: str, value: int | None) -> None:
    assert value_of_equation(_parse(latex)) == value

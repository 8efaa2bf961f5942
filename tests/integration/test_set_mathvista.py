"""MathVista from its object of questions to its figures: units, precisions, lists, equal choices, several skills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.published.case import Published, media
from tests.support.published.mathvista import TASK, question_row
from tests.support.scored_sets import Prepared, Row, check_table, prepare, prompts

pytestmark = pytest.mark.matrix


def about(*skills: str, **changes: Any) -> dict[str, Any]:
    return {"metadata": TASK | {"skills": list(skills)} | changes}


STATISTICS, ARITHMETIC = "statistical reasoning", "arithmetic reasoning"
QUESTIONS = [
    question_row("1", "multi_choice", "yes", choices=["no", "yes"], **about(STATISTICS)),
    question_row("2", "integer", "14", **about(STATISTICS, ARITHMETIC)),
    question_row("3", "float", "1.2", precision=1.0, unit="$", **about(ARITHMETIC, task="math word problem")),
    question_row("4", "float", "0.36", precision=2.0, **about(ARITHMETIC)),
    question_row("5", "list", "[2014, 2016]", **about(STATISTICS)),
    question_row("6", "integer", "-3", unit="cm", **about(ARITHMETIC, grade="college")),
    question_row("7", "multi_choice", "3", choices=["2", "2", "3"], **about(STATISTICS)),
    question_row("8", "multi_choice", "A", choices=["B", "A", "C"], **about(STATISTICS)),
    question_row("9", "multi_choice", "2", choices=["2", "2", "3"]),
    question_row("10", "float", "0.123", precision=3.0),
]
CASE = Published(
    {
        "data/testmini.json": {row["pid"]: row for row in QUESTIONS},
        **media(*(f"data/images/{number}.jpg" for number in range(1, 11))),
    },
    refused=[
        ("testmini.json:1, record 9", "9", "ambiguous_answer"),
        ("testmini.json:1, record 10", "10", "unknown_precision"),
    ],
)
# Published (without its judge): a choice's text, int() or float() of the whole output; any other output to a choice is
# the shortest choice, the first of several.
TABLE = [
    Row("1", "(B)", ("B", 1), ("A", 0)),
    Row("1", "yes", ("B", 1), ("B", 1)),
    Row("2", "14", ("14", 1), ("14", 1)),
    Row("2", "14.9", ("14.9", 0), (None, 0)),
    # The set's precision decides: round(1.25, 1) is 1.2 in Python.
    Row("3", "1.25", ("1.25", 1), ("1.2", 1)),
    Row("3", "1.20", ("1.2", 1), ("1.2", 1)),
    # Words that the question does not have.
    Row("4", "I read 0.36 from the chart.", (None, 0), (None, 0)),
    Row("4", "0.36", ("0.36", 1), ("0.36", 1)),
    Row("5", "[2014, 2016]", ("[2014, 2016]", 1), (None, 0)),
    Row("5", "[2016, 2014]", ("[2016, 2014]", 0), (None, 0)),
    Row("6", "It is -3 cm.", ("-3", 1), (None, 0)),
    Row("6", "3 cm", ("3", 0), (None, 0)),
    Row("7", "C", ("C", 1), ("A", 0)),
    Row("7", "3", ("C", 1), ("C", 1)),
    # In parentheses A is the letter; alone it may be the text of (B).
    Row("8", "The answer is (B).", ("B", 1), ("A", 0)),
    Row("8", "(A)", ("A", 0), ("A", 0)),
]


@pytest.fixture(scope="module")
def mathvista(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("mathvista", tmp_path_factory.mktemp("mathvista"), CASE)


def test_questions_are_asked_as_published(mathvista: Prepared, tmp_path: Path) -> None:
    """A picture of 32 x 32 grows to at least 256 * 28 * 28 pixels: 448 x 448."""
    rows = prompts(tmp_path, mathvista, "mathvista/official")
    asks, hint = "Question: What is the mean?", "Hint: Please answer the question"
    ends = ", at the end.\nSolution:"
    kinds = {
        "1": f"{asks}\nChoices:\n(A) no\n(B) yes\n{hint} and provide the correct option letter, e.g., A, B, C, D{ends}",
        "2": f"{asks}\n{hint} requiring an integer answer and provide the final value, e.g., 1, 2, 3{ends}",
        "3": f"{asks} (Unit: $)\n{hint} requiring a floating-point number with one decimal "
        f"place and provide the final value, e.g., 1.2, 1.3, 1.4{ends}",
        "5": f"{asks}\n{hint} requiring a Python list as an answer and provide the final list, "
        f"e.g., [1, 2, 3], [1.2, 1.3, 1.4]{ends}",
        "6": f"{asks} (Unit: cm)\n{hint} requiring an integer answer and provide the final value, e.g., 1, 2, 3{ends}",
    }
    assert {name: rows[name]["user"] for name in kinds} == kinds
    assert "with two decimal places and provide the final value, e.g., 1.23, 1.34, 1.45, at" in rows["4"]["user"]
    [medium] = rows["1"]["media"]
    assert (medium["kind"], medium["height"], medium["width"]) == ("image", 448, 448)
    assert rows["1"]["settings"]["max_new_tokens"] == 16384


def test_outputs_and_figures(mathvista: Prepared, tmp_path: Path) -> None:
    ours, published = check_table(tmp_path, mathvista, TABLE, "mathvista/official")
    # Means of two outputs. Ours: 1, 1/2, 1, 1/2, 1/2, 1/2, 1, 1/2 = 5.5 of 8. Unread is "I read ...".
    assert ours.counts == (8, 8, 1, 0, 0)
    assert ours.row["accuracy"] == pytest.approx(5.5 / 8)
    # A question counts for each of its skills: statistics 1, 2, 5, 7, 8; arithmetic 2, 3, 4, 6.
    skills = {STATISTICS: ((1 + 0.5 + 0.5 + 1 + 0.5) / 5, 5), ARITHMETIC: ((0.5 + 1 + 0.5 + 0.5) / 4, 4)}
    assert ours.group("skills") == skills
    assert ours.group("task") == {"figure question answering": (round(4.5 / 7, 6), 7), "math word problem": (1.0, 1)}
    assert ours.group("grade") == {"college": (0.5, 1), "daily life": (round(5 / 7, 6), 7)}
    assert ours.group("question_type") == {"free_form": (0.6, 5), "multi_choice": (round(2.5 / 3, 6), 3)}
    answer_types = {"float": (0.75, 2), "integer": (0.5, 2), "list": (0.5, 1), "text": (round(2.5 / 3, 6), 3)}
    assert ours.group("answer_type") == answer_types
    assert ours.group("context") == {"scatter plot": (0.6875, 8)}
    # Published: 1/2, 1/2, 1, 1/2, 0, 0, 1/2, 0 = 3 of 8. Unread are 14.9, "I read ...", the lists and the centimetres.
    assert published.row["accuracy"] == pytest.approx(3 / 8) and published.counts == (8, 8, 6, 0, 0)
    assert published.group("answer_type")["float"] == (0.75, 2)

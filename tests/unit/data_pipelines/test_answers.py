"""The small readers that pipelines share: instruction sentences, answers, ids, options in a question's lines."""

from __future__ import annotations

from typing import Any

import pytest

from data_pipelines.engine.answers import split_options, without_sentences
from data_pipelines.engine.fields import answer_text, list_of, listed, named, published
from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import SampleError


def test_known_sentences_leave_both_ends_in_any_order() -> None:
    known = ("<image>", "These are frames.", "Answer briefly.")
    text = " <image>\nThese are frames.\nHow many?\nAnswer briefly.\n"
    assert without_sentences(text, known) == "How many?"
    assert (
        without_sentences("These are frames. <image><image> How many <image> here?", known) == "How many <image> here?"
    )
    assert without_sentences("How many? Answer briefly. Now.", known) == "How many? Answer briefly. Now."
    assert without_sentences("Answer briefly.", known) == ""


@pytest.mark.parametrize(
    ("text", "question", "options"),
    [
        ("Which?\nA. red\nB. blue", "Which?", ["A. red", "B. blue"]),
        ("Which?\n\nOptions:\n(A) red \n  (B) light blue\n", "Which?", ["A. red", "B. light blue"]),
        ("Which?\nChoices:\nA) 1\nB) 2\nC) A. M.", "Which?", ["A. 1", "B. 2", "C. A. M."]),
        ("Take option A. Why?\nA. so\nB. not", "Take option A. Why?", ["A. so", "B. not"]),
        ("Which?\nB: red\nA: blue", "Which?", ["B. red", "A. blue"]),
        ("Which?\nD.C. is one\nA. D.C.\nB. A.D.", "Which?\nD.C. is one", ["A. D.C.", "B. A.D."]),
        ("Options:\nA. red\n\nB. blue", "", ["A. red", "B. blue"]),
        ("Who?\n  (she asks)\nA.red\nB.blue", "Who?\n  (she asks)", ["A. red", "B. blue"]),
        ("Which?\nA.D. or B.C.?", "Which?\nA.D. or B.C.?", []),
        ("Which of A. and B.?", "Which of A. and B.?", []),
        ("Which?\nA.U.S. Army\nB.NATO\nC. UN", "Which?", ["A. U.S. Army", "B. NATO", "C. UN"]),
        ("Which?\nA. NATO\n\nB.U.S. Army\n(C) UN", "Which?", ["A. NATO", "B. U.S. Army", "C. UN"]),
        ("Which?\nA.D.\nB.C.", "Which?\nA.D.\nB.C.", []),
    ],
)
def test_options_in_lines(text: str, question: str, options: list[str]) -> None:
    assert split_options(text) == (question, options)


@pytest.mark.parametrize(
    "text",
    [
        "Which?\nA. red\nC. blue",
        "Which?\nB. red\nC. blue",
        "Which?\nA. red\nor\nB. blue",
        "Which?\nA. red\nA. blue",
        "Which?\nOptions:\nred\nblue",
        "Which?\nOptions:",
        "Which?\nOptions:\nA. red\nOptions:\nA. blue",
        "A. a lone line",
        "Which?\nA. red\nB. blue\nor both",
    ],
)
def test_damaged_lines_of_options_are_refused(text: str) -> None:
    with pytest.raises(SampleError) as raised:
        split_options(text)
    assert raised.value.reason == "bad_options"


def test_a_few_letters_may_be_lost_where_the_caller_knows_what_to_do() -> None:
    assert split_options("Which?\nA. red\nB. blue\nD. green", gap=True)[1] == ["A. red", "B. blue", "D. green"]
    for text in ("Which?\nB. red\nD. blue", "Which?\nA. red\nA. blue", "Which?\nA. red\nC. blue\nor", "?\nA. x\nG. y"):
        with pytest.raises(SampleError):
            split_options(text, gap=True)


@pytest.mark.parametrize(
    ("value", "text"), [(4.0, "4"), (0, "0"), (0.5, "0.5"), (" B ", "B"), (10**20, "1" + "0" * 20)]
)
def test_answers_as_text(value: Any, text: str) -> None:
    assert answer_text({"b": value}, "a", "b") == text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no_gold_answer"),
        ("", "no_gold_answer"),
        (" ", "no_gold_answer"),
        (True, "wrong_type"),
        (float("inf"), "wrong_type"),
        ([4], "wrong_type"),
        (Unreadable("a number"), "unreadable_value"),
    ],
)
def test_what_is_no_answer_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(SampleError) as raised:
        answer_text({"answer": value}, "answer")
    assert raised.value.reason == reason


def test_an_id_of_0_is_one() -> None:
    rows: list[dict[str, Any]] = [{"id": value} for value in (0, " x ", 7.0, None, "", True, [3])]
    found = [named("id")(row, "name") for row in rows]
    assert found == [[(name, row)] for name, row in zip(("0", "x", "7", *["name"] * 4), rows, strict=True)]


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ({"from": ["human", "gpt"], "value": ["Who?", "I."]}, [("human", "Who?"), ("gpt", "I.")]),
        ({"from": ["human"], "value": [None]}, [("human", None)]),
        ({"from": [], "value": []}, []),
        ([{"from": "human", "value": "Who?"}], [("human", "Who?")]),
    ],
)
def test_objects_that_a_table_holds_field_by_field(value: Any, rows: list[tuple[str, Any]]) -> None:
    expected = [dict(zip(("from", "value"), row, strict=True)) for row in rows]
    assert listed(value, "it") == list_of({"turns": value}, "turns") == expected


@pytest.mark.parametrize("value", [{}, {"a": ["x"], "b": "y"}, {"a": 3}, [3], "text", None, 3])
def test_other_values_stay_as_they_are(value: Any) -> None:
    assert listed(value, "it") is value


def test_fields_of_unequal_length_are_refused() -> None:
    with pytest.raises(SampleError, match=r"'turns' holds lists of 2 of 'from', 1 of 'value'\. As many") as raised:
        list_of({"turns": {"from": ["human", "gpt"], "value": ["Who?"]}}, "turns")
    assert raised.value.reason == "uneven_lists"


def test_published_fields_are_kept_unless_empty() -> None:
    """So a table, which has every field in every row, and JSON, which has those that are there, give equal details."""
    row = {"unit": "", "precision": 0.0, "skills": [], "task": None, "is_new": False, "grade": "4", "other": 1}
    names = ("unit", "precision", "skills", "task", "is_new", "grade", "lost")
    assert published(row, *names) == {"precision": 0.0, "is_new": False, "grade": "4"}

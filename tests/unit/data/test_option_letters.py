"""A capital and a point before an option are its letter only where nothing else can be meant."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_pg.data.fields import close_gap, option_texts, options_of
from vlm_pg.data.records import parse_record, to_record
from vlm_pg.errors import SampleError

RECORD: dict[str, Any] = {"problem_id": 1, "problem": "Which?", "data_type": "text", "problem_type": "multiple choice"}
BACTERIA = ["E. coli", "S. aureus", "B. subtilis"]


def meaning(options: list[str], gold: str) -> str:
    """The text of the option that the gold answer means, or why it is ambiguous."""
    try:
        sample = parse_record(RECORD | {"options": options, "solution": f"<answer>{gold}</answer>"})
    except SampleError as fault:
        return f"refused: {fault.reason}"
    assert parse_record(to_record(sample)) == sample
    assert sorted(option_texts(sample.options)) == list("ABCD"[: len(options)])
    return option_texts(sample.options)[sample.answer]


@pytest.mark.parametrize(
    ("options", "gold", "text"),
    [
        (["A. x", "B. y", "C. z"], "C", "z"),
        (["A. .5", "B. 5.", "C. (x)"], "A", ".5"),
        (["A.x", "B.y"], "B", "y"),
        (["A. A.M.", "B. P.M."], "A", "A.M."),
        (BACTERIA, "A", "E. coli"),
        (BACTERIA, "B", "S. aureus"),  # not "B. subtilis"
        (BACTERIA, "B. subtilis", "B. subtilis"),
        (BACTERIA, "E", "refused: answer_not_in_options"),
        (["E. coli", "yeast"], "A", "E. coli"),
        (["D.C.", "A.C."], "A.C.", "A.C."),
        (["P: 3", "B: 4", "A: 7"], "A", "P: 3"),
        (["I. x", "V. y", "X. z"], "I", "refused: answer_not_in_options"),
        (["a. x", "b. y"], "B", "b. y"),
        (["D. w", "A. x", "B. y", "C. z"], "D", "w"),
        (["1. x", "2. y"], "B", "2. y"),
        # Letters with one lost, twice, or in another order, perhaps: "B" may be the second one or the one called so.
        (["A. x", "C. y", "D. z"], "C", "refused: bad_options"),
        (["B. x", "C. y", "D. z"], "C", "refused: bad_options"),
        (["B. x", "A. y"], "A", "refused: bad_options"),
        (["A. x", "A. y"], "A", "refused: bad_options"),
        (["A. red", "or crimson", "B. blue"], "B", "refused: bad_options"),
        (["x", "B. y"], "B", "refused: bad_options"),
        (["D. w", "A. x", "B. y", "B. z"], "D", "refused: bad_options"),
        # Some lost: the gold answer must give the text.
        (["A. x", "B. y", "D. z"], "z", "z"),
        (["A. x", "B. y", "D. z"], "D. z", "z"),
        (["A. x", "B. y", "D. z"], "(D) z", "z"),
        (["A. x", "B. y", "D. z"], "B", "refused: bad_options"),
        (["A. x", "B. y", "D. z"], "D", "refused: bad_options"),
        (["A. x", "B. y", "D. z"], "C. z", "refused: bad_options"),
        (["A. x", "B. y", "D. z"], "w", "refused: bad_options"),
        (["A. z", "B. y", "D. z"], "z", "refused: bad_options"),
        (["A. x", "B. y", "D. both C and A"], "x", "refused: bad_options"),
        (["A. x", "B. y C. z", "D. w"], "w", "refused: bad_options"),
        (["A. x", "B. D", "D. z"], "z", "refused: bad_options"),
        (["A. x", "B. y", "D. A"], "A", "refused: bad_options"),
        (["A. x", "B. y", "B. z"], "z", "refused: bad_options"),
        # Letters that run together with their texts.
        (["A.U.S. Army", "B.NATO", "C.UN"], "A", "U.S. Army"),
        (["A.U.S. Army", "B.NATO", "C.UN"], "U.S. Army", "U.S. Army"),
        (["A.U.S. Army", "B.NATO", "C.UN"], "A.U.S. Army", "U.S. Army"),
        (["A.U.S. Army", "B.NATO", "C.UN"], "A. U.S. Army", "U.S. Army"),
        (["A.U.S. Army", "B.NATO", "C.UN"], "B.U.S. Army", "refused: answer_not_in_options"),
        (["A. NATO", "B.U.S. Army", "(C) UN"], "B", "U.S. Army"),
        (["A.D.", "B.C."], "B", "B.C."),
        (["A.U.S. Army", "C.NATO", "D.UN"], "A", "refused: bad_options"),
        (["B.U.S. Army", "A.NATO"], "A", "refused: bad_options"),
    ],
)
def test_which_option_a_gold_answer_means(options: list[str], gold: str, text: str) -> None:
    assert meaning(options, gold) == text


def test_the_refusal_says_what_would_do() -> None:
    with pytest.raises(SampleError, match=r"'options' are 3, of which 2 begin with the letters \['B', 'A'\]\. The let"):
        options_of({"options": ["B. x", "A. y", "z"]})


@pytest.mark.parametrize("kind", ["multiple select", "multiple choice"])
def test_no_other_answer_takes_options_with_a_gap(kind: str) -> None:
    with pytest.raises(SampleError) as error:
        parse_record(
            RECORD | {"problem_type": kind, "options": ["A. x", "B. y", "D. z"], "solution": "<answer>A, B</answer>"}
        )
    assert error.value.reason == "bad_options"


def test_what_is_no_gap_stays_open() -> None:
    assert close_gap(["A. x", "B. y", "D. z"], "z") == (("A. x", "B. y", "C. z"), "C")
    for options in (["A. x", "B. z"], ["x", "z"], ["A. x", "z"], ["A. z"], [], ["A. x", "F. z"]):
        assert close_gap(options, "z") is None


def test_as_many_as_there_are_letters() -> None:
    many = [f"option {number}" for number in range(27)]
    assert options_of({"options": many[:26]})[-1] == "Z. option 25"
    assert options_of({"options": []}) == ()
    for options in (many, [f"A. {one}" for one in many], [*options_of({"options": many[:26]}), "x"]):
        with pytest.raises(SampleError, match=r"before all of at most 26 options"):
            options_of({"options": options})


@pytest.mark.parametrize("gold", ["A", "C"])
def test_of_several_right_ones_too(gold: str) -> None:
    several = RECORD | {"problem_type": "multiple select", "solution": f"<answer>{gold}, B</answer>"}
    sample = parse_record(several | {"options": BACTERIA})
    assert sample.answer == ("A, B" if gold == "A" else "B, C")
    assert sample.options == ("A. E. coli", "B. S. aureus", "C. B. subtilis")

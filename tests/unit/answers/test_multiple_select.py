"""Multiple select: an answer is right when it lists all right options and no other."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.choices import check_multiple_select
from vlm_pg.rewards.settings import RewardSettings

OPTIONS = ("A. the red cube", "B. it, and a sphere", "C. none of them", "D. a cat or a dog")


def value_of(answer: str, gold: str = "A, B", options: tuple[str, ...] = OPTIONS) -> float | None:
    return check_multiple_select(answer, make_sample("multiple_select", gold, options), RewardSettings()).value


@pytest.mark.parametrize(
    "answer",
    ["A, B", "B, A", "(A) and (B)", "a b", "AB", "A,B", "A, and B", "A & B", "[A, B]", "A\nB", "A; B", "A、B", "A. B."]
    + ["**A**, **B**", "\\boxed{A, B}", "The answer is A and B.", "Ａ，Ｂ", "A, A, B"]
    + ["A. the red cube; B. it, and a sphere", "- A. The red cube\n- B. it, and a sphere"],
)
def test_lists_of_all_right_options_are_right(answer: str) -> None:
    assert value_of(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *("A", "B", "A, B, C", "C, D", "none", "", "A, E", "A, B, C, D"),
        *("A or B", "either A, B", "A/B", "not A, B", "A, B?", "A, not B", "A and B are wrong", "BA", "A, B or C"),
        *("A. the red cube; B. a cat or a dog", "the red cube", "A-B", "A to B", "all", "A, B, none"),
    ],
)
def test_anything_else_is_wrong(answer: str) -> None:
    assert value_of(answer) == 0.0


def test_of_all_subsets_only_the_gold_one_is_right() -> None:
    subsets = [subset for size in range(5) for subset in itertools.combinations("ABCD", size)]
    options = tuple(f"{letter}. option {letter.lower() * 3}" for letter in "ABCD")
    for gold, answer in itertools.product(subsets, subsets):
        written = [", ".join(subset) or "none" for subset in (gold, answer)]
        assert value_of(written[1], written[0], options) == float(gold == answer)


def test_none_is_an_answer_unless_an_option_says_so() -> None:
    options = ("A. red", "B. blue")
    assert value_of("None of the options.", "none", options) == 1.0
    assert value_of("none", "none", ("A. red", "B. none")) == 0.0
    assert value_of("none", "A", options) == 0.0


@pytest.mark.parametrize("gold", ["E", "A or B", "A,B", "??"])
def test_a_gold_answer_that_is_no_list_has_no_value(gold: str) -> None:
    assert value_of("A, B", gold) is None

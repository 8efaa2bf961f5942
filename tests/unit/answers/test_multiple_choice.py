"""A letter is read in all its usual spellings; two letters, or the article "a", are never the right letter."""

from __future__ import annotations

import pytest

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.choices import check_multiple_choice, named_letters, split_options
from vlm_pg.rewards.settings import RewardSettings

OPTIONS = ("A. red", "B. blue", "C. A dog", "D. Vitamin C")
SETTINGS = RewardSettings()


def accuracy(answer: str, gold: str = "B", options: tuple[str, ...] = OPTIONS) -> float | None:
    return check_multiple_choice(answer, make_sample("multiple_choice", gold, options), SETTINGS).value


@pytest.mark.parametrize(
    "answer",
    ["B", "b", " B\n", "B.", "B)", "(B)", "b)", "(b).", "B:", "Option B", "option b", "B. blue", "B) blue", "(B) blue"]
    + ["B: blue", "B - blue", "blue", "Blue.", "The answer is B", "answer: b", "**B**", "\\boxed{B}", "$B$", "（B）"]
    + ["I think it is B.", "B, I think", "B)blue", "b - blue", "B-blue", "B blue", "[B]", "[b]", "option (b)"]
    + ["\\boxed{\\text{(B)}}", "$\\boxed{\\mathrm{B}}$", "**Answer:** B", "**b**", "I choose b.", "I choose blue"]
    + ["The answer is blue.", "The correct answer is: **blue**", "The correct option is b", "My answer: (B) blue"]
    + ["the answer is b because the sky is", "B\nThe sky is seen.", "Option B (blue)", "option: b"]
    + ["B, since a dog wears a T-shirt", "not A but B"],
)  # fmt: skip
def test_usual_spellings_of_the_right_letter(answer: str) -> None:
    assert accuracy(answer) == 1.0
    assert accuracy(answer, gold="A") == 0.0


@pytest.mark.parametrize(
    "answer",
    ["A or B", "A, B", "B and C", "B. red", "B. blue or C", "(A) (B)", "option A, option B"]
    + ["B - red", "B) red", "both A and B", "A/B", "A & B", "The answer is A. blue", "Answer: B or A"],
)
@pytest.mark.parametrize("gold", ["A", "B", "C"])
def test_two_letters_are_wrong_whichever_is_gold(answer: str, gold: str) -> None:
    assert accuracy(answer, gold) == 0.0


@pytest.mark.parametrize(
    "answer", ["A red car", "a red car", "the answer is a blue one", "It shows a dog", "a dog or a cat"]
)
def test_the_article_is_not_option_a(answer: str) -> None:
    assert accuracy(answer, gold="A") == 0.0


def test_a_letter_inside_its_own_options_text_is_no_second_letter() -> None:
    assert named_letters("D. Vitamin C", OPTIONS) == {"D"}
    assert named_letters("C. A dog", OPTIONS) == {"C"}
    assert named_letters("Vitamin C", OPTIONS) == {"D"}
    assert named_letters("D. Vitamin C is best", OPTIONS) == {"D"}
    assert named_letters("The answer is D. Vitamin C", OPTIONS) == {"D"}
    assert named_letters("It must be (D) Vitamin C, which is healthy", OPTIONS) == {"D"}


@pytest.mark.parametrize("form", ["{}", "({})", "{}.", "({}).", "The answer is ({})."])
def test_a_letter_alone_is_a_letter_where_it_is_another_options_text(form: str) -> None:
    options = ("A. B", "B. A", "C. C")
    assert [named_letters(form.format(letter), options) for letter in "ABC"] == [{"A"}, {"B"}, {"C"}]


def test_texts_that_contain_one_another_are_told_apart() -> None:
    options = ("A. red", "B. red car", "C. blue car", "D. car")
    for letter, text in split_options(options):
        for answer in (text, f"{letter}. {text}", f"The answer is {text}", f"Option {letter} ({text})"):
            assert named_letters(answer, options) == {letter}, answer
    assert named_letters("B. red", options) == {"A", "B"}
    assert named_letters("A. red car", options) == {"A", "B"}


def test_options_that_are_letters_or_numbers() -> None:
    options = ("A. h", "B. C", "C. 5", "D. 3.5")
    assert named_letters("h", options) == {"A"}
    assert named_letters("C", options) == {"C"}  # a letter is a letter first
    assert named_letters("B. C", options) == {"B"}
    assert named_letters("The answer is 5.", options) == {"C"}
    assert named_letters("D. 3.5", options) == named_letters("3.5", options) == {"D"}


@pytest.mark.parametrize("answer", ["", "none", "Banana", "AB", "red blue", "E", "?"])
def test_no_or_foreign_letter_is_wrong(answer: str) -> None:
    assert accuracy(answer) == 0.0


@pytest.mark.parametrize("gold", ["unclear", "A, B", "E", ""])
def test_gold_that_names_no_single_option_has_no_value(gold: str) -> None:
    verdict = check_multiple_choice("B", make_sample("multiple_choice", gold, OPTIONS), SETTINGS)
    assert verdict.value is None
    assert "gold answer" in verdict.note


def test_gold_may_be_the_options_text() -> None:
    assert accuracy("B", gold="blue") == 1.0


def test_options_without_labels_are_lettered_in_order() -> None:
    assert split_options(("red", "blue")) == [("A", "red"), ("B", "blue")]
    assert accuracy("blue", gold="B", options=("red", "blue")) == 1.0


def test_equal_option_texts_are_ambiguous() -> None:
    assert accuracy("red", gold="A", options=("A. red", "B. red")) == 0.0


FORMULAS = ("A. \\frac{3}{4}", "B. \\frac{4}{3}", "C. 3\\sqrt{2}", "D. 3\\sqrt{3}")


@pytest.mark.parametrize(
    ("answer", "letters"),
    [
        ("\\boxed{\\frac{3}{4}}", "A"),
        ("\\boxed{\n  \\dfrac{4}{3}\n}", "B"),
        ("3/4", "A"),
        ("\\boxed{3√2}", "C"),
        ("$x = 3 \\sqrt {3}$", "D"),
        ("The length is $\\boxed{3\\sqrt{2}}$.", "C"),
        ("So we get $\\boxed{3\\sqrt{2}}$.", "C"),
        ("$\\boxed{\\text{(C)}}$: $3\\sqrt{2}$", "C"),
        ("\\boxed{B. \\frac{3}{4}}", "AB"),
        ("So we get \\boxed{C. 3\\sqrt{3}}", "CD"),
        ("-\\frac{3}{4}", ""),
        ("33\\sqrt{2}", ""),
        ("3\\sqrt{2} or 3\\sqrt{3}", ""),
        ("not \\boxed{3\\sqrt{2}}", ""),
        ("\\boxed{3\\sqrt{2}} or 5", ""),
    ],
)
def test_options_that_are_formulas_are_read_in_any_spelling_and_never_a_neighbour(answer: str, letters: str) -> None:
    assert named_letters(answer, FORMULAS) == set(letters)


def test_a_mixed_number_is_no_fraction_and_a_power_no_number() -> None:
    options = ("A. 1½", "B. 11/2", "C. 10²", "D. 102")
    for answer, letter in (("1½", "A"), ("1\\frac{1}{2}", "A"), ("\\frac{11}{2}", "B"), ("10^2", "C"), ("102", "D")):
        assert named_letters(answer, options) == {letter}, answer


@pytest.mark.parametrize("answer", ["9 A", "\\boxed{9\\text{ A}}", "I = 9 A", "28 °C", "6 V", "5, 6", "5 - 6"])
def test_a_unit_is_no_letter_and_a_list_of_numbers_no_option(answer: str) -> None:
    assert named_letters(answer, ("A. 5 A", "B. 6 A", "C. 5", "D. 18 °C")) == set()


def test_the_value_of_a_named_angle_is_the_answer() -> None:
    options = ("A. 30", "B. 40", "C. 50")
    assert named_letters("\\angle A = 40", options) == {"B"}
    assert named_letters("\\angle A = 45", options) == named_letters("C = 45", options) == set()
    assert named_letters("C = 40", options) == {"B", "C"}
    assert named_letters("AB = 30, so C", options) == {"C"}

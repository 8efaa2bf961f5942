"""Exact answers differ in writing only; yes and no are read in their usual spellings, and both is neither."""

from __future__ import annotations

import pytest

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.choices import check_yes_no, stated_sides
from vlm_pg.answers.texts import check_exact
from vlm_pg.answers.verdict import Verdict
from vlm_pg.rewards.settings import RewardSettings

SETTINGS = RewardSettings()


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("New York", "New York", 1.0),
        (" new\n york. ", "New York", 1.0),
        ("Ｎew　York！", "New York", 1.0),  # full-width forms
        ("STRASSE", "Straße", 1.0),
        ("cafe\u0301", "café", 1.0),  # a letter and its accent as two code points
        ("ﬁre", "fire", 1.0),
        ("red。", "red", 1.0),
        ("New  York City", "New York", 0.0),
        ("NewYork", "New York", 0.0),
        (".red", "red", 0.0),
        ("1.5", "15", 0.0),
        ("red", "read", 0.0),
    ],
)
def test_exact(answer: str, gold: str, value: float) -> None:
    assert check_exact(answer, make_sample("exact", gold), SETTINGS) == Verdict(value)


@pytest.mark.parametrize("gold", ["??", " ", ". . ."])
def test_exact_gold_of_punctuation_has_no_value(gold: str) -> None:
    verdict = check_exact("red", make_sample("exact", gold), SETTINGS)
    assert verdict.value is None and "gold answer" in verdict.note


YES = ["yes", "Yes.", "YES!", "y", "true", "True", "(yes)", "**Yes**", "\\boxed{Yes}", "$\\text{yes}$", "Ｙｅｓ"]
YES += ["Yes, because there is no car.", "The answer is yes", "Answer: Yes", "That is true."]
YES += ["Yes, there are no others", "yes - it is", "not false", "It isn't false"]
NO = ["no", "No.", "NO", "n", "false", "(No)", "**no**", "\\boxed{No}", "nope", "No, it is red", "The answer is no."]
NO += ["the answer is no because it is red", "Answer: no", "It is false.", "not true", "It isn’t true"]
NO += ["No car is visible"]
NEITHER = ["", "maybe", "There is no car", "yesterday", "nothing", "no-one", "untrue", "noes", "B"]
BOTH = ["yes or no", "Yes. No.", "yes/no", "true or false", "No, wait: yes", "yes and no", "Yes... No, it is not"]


@pytest.mark.parametrize(("texts", "sides"), [(YES, {"yes"}), (NO, {"no"}), (NEITHER, set()), (BOTH, {"yes", "no"})])
def test_stated_sides(texts: list[str], sides: set[str]) -> None:
    assert {text: stated_sides(text) for text in texts} == dict.fromkeys(texts, sides)


@pytest.mark.parametrize(("gold", "right", "wrong"), [("Yes", YES, NO), ("no", NO, YES), ("True", YES, NO)])
def test_yes_no_accuracy(gold: str, right: list[str], wrong: list[str]) -> None:
    sample = make_sample("yes_no", gold)
    assert {check_yes_no(answer, sample, SETTINGS) for answer in right} == {Verdict(1.0)}
    assert {check_yes_no(answer, sample, SETTINGS) for answer in wrong} == {Verdict(0.0)}
    assert {check_yes_no(answer, sample, SETTINGS) for answer in BOTH} == {Verdict(0.0, "answer says both yes and no")}
    assert {check_yes_no(answer, sample, SETTINGS) for answer in NEITHER} == {
        Verdict(0.0, "answer says neither yes nor no")
    }


@pytest.mark.parametrize("gold", ["??", "yes or no", "maybe"])
def test_yes_no_gold_that_says_neither_or_both_has_no_value(gold: str) -> None:
    verdict = check_yes_no("yes", make_sample("yes_no", gold), SETTINGS)
    assert verdict.value is None and "gold answer" in verdict.note

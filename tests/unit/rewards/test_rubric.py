"""Format and accuracy add up by weight; what cannot be computed is "no value", never 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.answers.helpers import make_sample, respond
from vlm_pg.answers.grading import CHECKERS
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.format import extract_answer, format_reward
from vlm_pg.rewards.rubric import total_reward
from vlm_pg.rewards.settings import CheckerSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind, RewardBreakdown, Sample

SETTINGS = RewardSettings(checker=CheckerSettings(workers=1, timeout_seconds=60.0))
GOLD: dict[AnswerKind, str] = {
    "multiple_choice": "B",
    "multiple_select": "A, B",
    "numerical": "5",
    "ocr": "open the door",
    "free_form": "a person flips a pancake",
    "regression": "12.5",
    "mean_relative_accuracy": "12.5",
    "mathematics": "\\frac{1}{2}",
    "box": "[1, 2, 30, 40]",
    "time_span": "[1.5, 3]",
    "exact": "a red car",
    "yes_no": "yes",
}
UNUSABLE_GOLD: dict[AnswerKind, str] = dict.fromkeys(ANSWER_KINDS, "??") | {"ocr": " ", "exact": " "}


@pytest.fixture(scope="module")
def rewarder() -> Iterator[Rewarder]:
    with Rewarder(SETTINGS) as rewarder:
        yield rewarder


def score_one(rewarder: Rewarder, sample: Sample, text: str) -> RewardBreakdown:
    [reward] = rewarder.score([Response(sample, text)])
    return reward


def score(sample: Sample, text: str, settings: RewardSettings) -> RewardBreakdown:
    with Rewarder(settings) as rewarder:
        return score_one(rewarder, sample, text)


def test_every_answer_kind_has_a_checker() -> None:
    assert set(CHECKERS) | {"mathematics"} == set(ANSWER_KINDS) == set(GOLD)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>x</think><answer>B</answer>", 1.0),
        ("\n<think>x\ny</think>\n <answer>B</answer> \n", 1.0),
        ("<answer>B</answer>", 0.0),
        ("<think>x</think>", 0.0),
        ("<answer>B</answer><think>x</think>", 0.0),
        ("<think>x</think> so <answer>B</answer>", 0.0),
        ("Sure. <think>x</think><answer>B</answer>", 0.0),
        ("<think>x</think><answer>B</answer>.", 0.0),
        ("<think>x</think><think>y</think><answer>B</answer>", 0.0),
        ("<think>x</think><answer>B</answer><answer>C</answer>", 0.0),
        ("<think>x<answer>B</answer></think>", 0.0),
        ("<think><answer>B</think></answer>", 0.0),
        ("<THINK>x</THINK><ANSWER>B</ANSWER>", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_one_think_block_then_one_answer_block(text: str, value: float) -> None:
    assert format_reward(text) == value


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "x"]), max_size=8).map("".join))
def test_format_agrees_with_an_independent_reading(text: str) -> None:
    stripped, tags = text.strip(), ("<think>", "</think>", "<answer>", "</answer>")
    order = [tag for _, tag in sorted((stripped.find(tag), tag) for tag in tags)]
    once = all(stripped.count(tag) == 1 for tag in tags)
    expected = once and tuple(order) == tags and stripped[:7] == "<think>" and stripped[-9:] == "</answer>"
    expected = expected and stripped.split("</think>")[1].split("<answer>")[0].strip() == ""
    assert format_reward(text) == float(expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> B </answer> <answer>C</answer>", "C"),
        ("<answer>B</answer> <answer>C", "B"),
        ("<answer>A <answer>B</answer>", "B"),
        ("<answer>B</answer></answer>", "B"),
        ("<think><answer>A</answer></think><answer>B</answer>", "B"),
        ("<think>x</think><answer>B</answer><think><answer>A</answer></think>", "B"),
        ("<answer>A</answer></think><answer>B</answer>", "B"),  # the prompt opened the think block
        ("<think><answer>A</answer></think>", None),
        ("<think><answer>A</answer> or", None),  # it never ends
        ("<think>x <answer>A</answer> no <answer>B</answer>\n", "B"),  # only its closing tag was left out
        ("<think>x</think><answer>A</answer><think>y", "A"),
        ("<answer>B<think><answer>A</answer></think></answer>", "B"),
        ("</think></think><answer>B</answer>", "B"),
    ],
)
def test_the_last_answer_element_outside_of_think_blocks_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_what_is_no_answer_element() -> None:
    assert extract_answer("<answer>B") is None
    assert extract_answer("</answer>B<answer>") is None


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_a_gold_answer_earns_full_reward(rewarder: Rewarder, kind: AnswerKind) -> None:
    reward = score_one(rewarder, make_sample(kind, GOLD[kind]), respond(GOLD[kind]))
    assert reward.total == pytest.approx(1.1)
    assert reward.parts == {"accuracy": pytest.approx(1.0), "format": 1.0}
    assert reward.notes == {}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
@pytest.mark.parametrize("text", ["", "B", respond(""), respond("B"), "<answer>" + "9" * 5000 + "</answer>"])
def test_unusable_gold_has_no_value_whatever_the_response(rewarder: Rewarder, kind: AnswerKind, text: str) -> None:
    reward = score_one(rewarder, make_sample(kind, UNUSABLE_GOLD[kind]), text)
    assert reward.parts["accuracy"] is None
    assert reward.total is None
    assert "gold answer" in reward.notes["accuracy"]


def test_a_part_that_does_not_count_may_have_no_value() -> None:
    reward = score(make_sample("numerical", "??"), respond("5"), RewardSettings(accuracy_weight=0.0, format_weight=2.0))
    assert reward.parts["accuracy"] is None
    assert reward.total == 2.0


@pytest.mark.parametrize("kind", ANSWER_KINDS)
@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("<think>x</think> " + "B", "no <answer> block"),
        ("<think>x</think><answer> </answer>", "empty answer"),
        (
            "<answer>" + "B " * 3000 + "</answer>",
            "answer has 5999 characters, more than the 4096 that are read (reward.max_answer_characters)",
        ),
    ],
)
def test_a_response_without_a_readable_answer_is_wrong_and_says_why(
    rewarder: Rewarder, kind: AnswerKind, text: str, note: str
) -> None:
    reward = score_one(rewarder, make_sample(kind, GOLD[kind]), text)
    assert reward.parts["accuracy"] == 0.0
    assert reward.notes == {"accuracy": note}


def test_the_total_is_weight_times_part() -> None:
    assert total_reward({"a": 0.5, "b": -1.0}, {"a": 2.0, "b": 0.5}) == 0.5
    assert total_reward({"a": 0.5, "b": None}, {"a": 2.0, "b": 0.5}) is None
    assert total_reward({"a": 0.5, "b": None}, {"a": 2.0, "b": 0.0}) == 1.0


def test_weights() -> None:
    sample = make_sample("numerical", "5")
    assert score(sample, "<answer>5</answer>", RewardSettings(accuracy_weight=2.0, format_weight=0.5)).total == 2.0
    assert score(sample, respond("6"), RewardSettings(accuracy_weight=2.0, format_weight=0.5)).total == 0.5


@pytest.mark.parametrize("kind", CHECKERS)
@given(text=st.text(max_size=300))
def test_no_text_breaks_a_checker(kind: AnswerKind, text: str) -> None:
    reward = score(make_sample(kind, GOLD[kind], ("A. red", "B. blue")), respond(text), SETTINGS)
    assert reward.total is not None
    assert 0.0 <= reward.total <= 1.1

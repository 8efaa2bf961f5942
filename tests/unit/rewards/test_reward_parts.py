"""Format and accuracy add up by weight; what cannot be computed is "no value", never 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.answers.helpers import GOLD, make_sample, respond
from vlm_pg.answers.grading import CHECKERS
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.parts import (
    extract_answer,
    format_reward,
    language_reward,
    length_reward,
    repetition_reward,
    total_reward,
)
from vlm_pg.rewards.settings import CheckerSettings, LanguageSettings, LengthSettings, RepetitionSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind, RewardBreakdown, Sample

SETTINGS = RewardSettings(checker=CheckerSettings(workers=1, timeout_seconds=60.0))
UNUSABLE_GOLD: dict[AnswerKind, str] = dict.fromkeys(ANSWER_KINDS, "??") | {"ocr": " ", "exact": " "}


@pytest.fixture(scope="module")
def rewarder() -> Iterator[Rewarder]:
    with Rewarder(SETTINGS) as rewarder:
        yield rewarder


def score_one(rewarder: Rewarder, sample: Sample, text: str) -> RewardBreakdown:
    [reward] = rewarder.score([Response(sample, text)])
    return reward


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
        ("<answer>B", None),
        ("</answer>B<answer>", None),
    ],
)
def test_the_last_answer_element_outside_of_think_blocks_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


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


@pytest.mark.parametrize("kind", CHECKERS)
@settings(max_examples=50)
@given(text=st.text(max_size=300))
def test_no_text_breaks_a_checker(kind: AnswerKind, text: str) -> None:
    verdict = CHECKERS[kind](text, make_sample(kind, GOLD[kind], ("A. red", "B. blue")), SETTINGS)
    assert verdict.value is not None and 0.0 <= verdict.value <= 1.0


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [(0, 0.0), (50, 0.5), (99, 0.99), (100, 1.0), (200, 1.0), (201, 0.995), (300, 0.5), (400, 0.0), (9999, 0.0)],
)
def test_length_falls_on_both_sides(num_tokens: int, value: float) -> None:
    settings = LengthSettings(min_tokens=100, max_tokens=200)
    assert length_reward(num_tokens, settings) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "ngram", "value"),
    [
        ("a b c d e", 2, 1.0),
        ("a b a b a b", 2, 2 / 5),  # ab, ba, ab, ba, ab
        ("The the THE", 1, 1 / 3),
        ("a b\n\tc  a b c", 3, 3 / 4),  # abc, bca, cab, abc
        ("a b c", 3, 1.0),
        ("a a", 3, 1.0),  # shorter than one n-gram
        ("", 1, 1.0),
        ("红色红色红色", 2, 2 / 5),
        ("赤い 赤い", 2, 2 / 3),  # 赤い, い赤, 赤い
        ("สวัสดีสวัสดี", 6, 6 / 7),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(text: str, ngram: int, value: float) -> None:
    assert repetition_reward(text, RepetitionSettings(ngram=ngram)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "script", "value"),
    [
        ("<think>abc</think><answer>5</answer>", "latin", 1.0),
        ("<think>红色</think><answer>红</answer>", "han", 1.0),  # the tags are not Latin text
        ("红a", "han", 0.5),
        ("Größe, œuvre, ａｂ", "latin", 1.0),
        ("赤いバラ 々", "japanese", 1.0),
        ("赤いバ", "han", 1 / 3),
        ("빨간색", "hangul", 1.0),
        ("красный red", "cyrillic", 0.7),
        ("κόκκινο", "greek", 1.0),
        ("أحمر", "arabic", 1.0),
        ("אדום", "hebrew", 1.0),
        ("लाल", "devanagari", 1.0),
        ("red", "greek", 0.0),
        ("12 + 3 = 15 √ ½", "latin", 1.0),
        ("", "latin", 1.0),
    ],
)
def test_language_is_the_share_of_letters_in_its_script(text: str, script: str, value: float) -> None:
    settings = LanguageSettings.model_validate({"script": script})
    assert language_reward(text, settings) == pytest.approx(value, abs=1e-12)

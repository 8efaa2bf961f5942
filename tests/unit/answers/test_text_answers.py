"""OCR is one minus the word error rate; free-form answers are the mean of ROUGE-1, 2 and L."""

from __future__ import annotations

import pytest

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers.texts import check_free_form, check_ocr
from vlm_pg.rewards.settings import RewardSettings

SETTINGS = RewardSettings()


@pytest.mark.parametrize(
    ("answer", "accuracy"),
    [
        ("open the door", 1.0),  # no edit
        ("open  the\ndoor", 1.0),  # only white space differs
        ("open a door", 2 / 3),  # one word of three substituted
        ("open door", 2 / 3),  # one deleted
        ("please do open the very red front door", 0.0),  # five inserted: WER above 1 is held at 0
        ("", 0.0),
    ],
)
def test_ocr_accuracy(answer: str, accuracy: float) -> None:
    assert check_ocr(answer, make_sample("ocr", "open the door"), SETTINGS).value == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.parametrize(
    ("gold", "answer", "accuracy"),
    [
        ("出口在左边", "出口在右边", 0.8),  # one character of five
        ("出口在左边", "出口 在左边", 1.0),  # no gaps are written
        ("第3章 Intro", "第3章 intro", 0.75),
        ("ＡＢＣ １", "ABC 1", 1.0),
        ("สวัสดี", "สวัสดี", 1.0),
    ],
)
def test_ocr_counts_characters_where_a_script_has_no_gaps(gold: str, answer: str, accuracy: float) -> None:
    assert check_ocr(answer, make_sample("ocr", gold), SETTINGS).value == pytest.approx(accuracy, abs=1e-12)


def test_whether_ocr_counts_case_is_a_setting() -> None:
    sample = make_sample("ocr", "Open The door")
    assert check_ocr("open the door", sample, SETTINGS).value == pytest.approx(1 / 3)
    assert check_ocr("open the door", sample, RewardSettings(ocr_case_sensitive=False)).value == 1.0


def test_free_form_reads_other_scripts_and_leaves_out_a_lead_in() -> None:
    assert check_free_form("猫", make_sample("free_form", "猫"), SETTINGS).value == pytest.approx(1.0)
    assert check_free_form("красная машина", make_sample("free_form", "красный дом"), SETTINGS).value == 0.0
    assert check_free_form("The answer is a red car.", make_sample("free_form", "a red car"), SETTINGS).value == 1.0


def test_empty_ocr_gold_has_no_value() -> None:
    assert check_ocr("open", make_sample("ocr", "  "), SETTINGS).value is None


def test_free_form_is_the_mean_of_three_f1() -> None:
    # Words a b c against a c b: ROUGE-1 3/3, ROUGE-2 0 of 2 pairs, ROUGE-L 2/3.
    value = check_free_form("red green blue", make_sample("free_form", "red blue green"), SETTINGS).value
    assert value == pytest.approx((1.0 + 0.0 + 2 / 3) / 3, abs=1e-12)


def test_free_form_stems_words() -> None:
    assert check_free_form("the dogs jumped", make_sample("free_form", "the dog jumps"), SETTINGS).value == 1.0


@pytest.mark.parametrize("gold", ["Pancakes", "A person flips a pancake."])
def test_repeating_the_gold_answer_earns_one(gold: str) -> None:
    assert check_free_form(gold, make_sample("free_form", gold), SETTINGS).value == pytest.approx(1.0)


def test_gold_without_readable_words_has_no_value() -> None:
    verdict = check_free_form("??", make_sample("free_form", "??"), SETTINGS)
    assert verdict.value is None
    assert "no words that ROUGE reads" in verdict.note
